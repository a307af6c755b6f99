"""timm's BatchNormAct2d on batch statistics: examples at the statistics of their batch, whose sum is the batch gradient."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from oracles import assert_measures
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.workspace import Workspace


def build_layer(generator, **options):
    layer = BatchNormAct2d(4, **options).double()
    for param in layer.parameters():
        nn.init.normal_(param, generator=generator)
    return layer


@pytest.mark.parametrize(
    "options", [{}, {"act_layer": "silu"}, {"act_layer": "leaky_relu"}, {"track_running_stats": False}]
)
def test_contributions_are_those_of_single_examples_at_the_batch_statistics(options, generator):
    layer = build_layer(generator, **options)
    x, delta = (torch.randn(5, 4, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    fixed = copy.deepcopy(layer).eval()
    fixed.running_mean, fixed.running_var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    rule = rule_for(layer)
    found, totals = rule(layer, (x,), delta), rule.sums(layer, (x,), delta, Workspace())
    batch = torch.autograd.grad(layer(x), [layer.weight, layer.bias], delta)
    for name, grad in zip(("weight", "bias"), batch, strict=True):
        torch.testing.assert_close(totals[name][0], grad)
        torch.testing.assert_close(totals[name][1], found[name].square().sum(0))
    for i in range(5):
        truth = torch.autograd.grad(fixed(x[i : i + 1]), [fixed.weight, fixed.bias], delta[i : i + 1])
        for name, value in zip(("weight", "bias"), truth, strict=True):
            torch.testing.assert_close(found[name][i], value)


def small_network():
    """resnetv2 with one block in each stage, all of its BatchNorms being BatchNormAct2d."""
    return timm.create_model(
        "resnetv2_50", num_classes=3, layers=(1, 1), channels=(8, 16), stem_chs=8, norm_layer=BatchNormAct2d, in_chans=3
    ).double()


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_a_network_in_evaluation_mode_equals_the_loop(engine, generator):
    model, x = small_network().eval(), torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 1])
    measured = measure(model, lambda: F.cross_entropy(model(x), y), engine=engine)
    assert_measures(measured, model, list(zip(x, y, strict=True)), classify, 1e-8)


def classify(model, example):
    return F.cross_entropy(model(example[0][None]), example[1][None])


def test_an_activation_with_parameters_is_measured_beside_the_layer(generator):
    """The rule covers activations without; then the layer is measured by its rows, and its activation by itself."""
    torch.manual_seed(0)
    joined = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4, inplace=False, act_layer=nn.PReLU)).double()
    apart = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU()).double()
    state = dict(zip(apart.state_dict(), joined.state_dict().values(), strict=True))
    apart.load_state_dict(state)
    x = torch.randn(4, 3, 5, 5, generator=generator, dtype=torch.float64)
    found, expected = (measure(model, lambda model=model: model(x).square().mean()) for model in (joined, apart))
    for key in ("grad", "curvature"):
        values = zip(getattr(found, key).values(), getattr(expected, key).values(), strict=True)
        for one, other in values:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)
