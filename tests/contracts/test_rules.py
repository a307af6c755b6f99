"""What every layer rule promises, against its slower twin, the generic rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bayes.curvature.rules.generic import Call
from lightning_bayes.curvature.rules.registry import _RULES, per_example, sums

LAYERS = {
    nn.Linear: (lambda: nn.Linear(4, 3), (5, 6, 4)),
    nn.Conv2d: (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4, 7, 7)),
    nn.BatchNorm1d: (lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
    nn.BatchNorm2d: (lambda: nn.BatchNorm2d(4).eval(), (5, 4, 3, 3)),
    nn.BatchNorm3d: (lambda: nn.BatchNorm3d(4).eval(), (5, 4, 2, 3, 3)),
    nn.LayerNorm: (lambda: nn.LayerNorm((3, 4)), (5, 2, 3, 4)),
    nn.GroupNorm: (lambda: nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    nn.Embedding: (lambda: nn.Embedding(7, 3), (5, 6)),
}


@pytest.fixture(params=sorted(_RULES, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def case(request, generator):
    """A layer of every registered type, an input, and a gradient of its output."""
    build, shape = LAYERS[request.param]
    layer = build().double()
    for param in layer.parameters():
        nn.init.normal_(param, generator=generator)
    is_embedding = request.param is nn.Embedding
    x = (
        torch.randint(0, 7, shape, generator=generator)
        if is_embedding
        else torch.randn(shape, generator=generator).double()
    )
    delta = torch.randn(layer(x).shape, generator=generator, dtype=torch.float64)
    return request.param, layer, x, delta


def test_rule_equals_the_generic_rule(case):
    kind, layer, x, delta = case
    params = {name: p.detach() for name, p in layer.named_parameters()}
    twin = Call(layer, (x,), {}).per_example(params, [delta])
    found = per_example(kind, layer, x, delta)
    for name, truth in twin.items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-12)


def test_sums_are_those_of_the_contributions(case, monkeypatch):
    kind, layer, x, delta = case
    each = per_example(kind, layer, x, delta)
    monkeypatch.setattr("lightning_bayes.curvature.rules.registry.CHUNK_ELEMENTS", 1)  # one example at a time
    for name, (grad, square) in sums(kind, layer, x, delta).items():
        torch.testing.assert_close(grad, each[name].sum(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(square, each[name].square().sum(0), rtol=1e-10, atol=1e-12)


def test_rule_leaves_its_arguments_alone(case):
    kind, layer, x, delta = case
    kept = x.clone(), delta.clone()
    sums(kind, layer, x, delta)
    assert torch.equal(x, kept[0])
    assert torch.equal(delta, kept[1])
