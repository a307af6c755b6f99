"""Dropout between the layers of a recurrent network, which a loop over examples draws otherwise, and unused outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.workspace import Workspace


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_contributions_under_dropout_add_up_to_the_gradient(kind, bidirectional, generator):
    layer = kind(4, 3, num_layers=3, dropout=0.5, bidirectional=bidirectional).double()
    x = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)

    def loss():
        torch.manual_seed(3)
        return layer(x)[0].square().sum(0).mean()

    with torch.random.fork_rng(devices=[]):
        measured = measure(layer, loss, loss_reduction="mean")
        true = torch.autograd.grad(loss(), list(layer.parameters()))
    for (name, _), grad in zip(layer.named_parameters(), true, strict=True):
        torch.testing.assert_close(measured.grad[name], grad, rtol=1e-10, atol=1e-13)


def test_squares_under_dropout_are_those_of_an_example_with_its_mask(generator):
    """An example whose output gradient alone is not zero has the whole gradient, whatever its mask."""
    layer = nn.GRU(4, 3, num_layers=2, dropout=0.5).double()
    x, rule = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64), rule_for(layer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output, last = layer(x)
        deltas = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in (output, last)]
        torch.manual_seed(0)
        each = rule(layer, (x, None), tuple(deltas))
    for i in range(5):
        alone = [torch.zeros_like(delta).index_copy_(1, torch.tensor([i]), delta[:, i : i + 1]) for delta in deltas]
        true = torch.autograd.grad([output, last], list(layer.parameters()), alone, retain_graph=True)
        for (name, _), grad in zip(layer.named_parameters(), true, strict=True):
            torch.testing.assert_close(each[name][i], grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_outputs_without_a_gradient_count_as_zero(used, generator):
    layer = nn.LSTM(4, 3, batch_first=True).double()
    x = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64)
    output, (h, c) = layer(x)
    outputs = [output, h, c]
    deltas = [torch.randn_like(o) if i == used else None for i, o in enumerate(outputs)]
    found = rule_for(layer).sums(layer, (x, None), tuple(deltas), Workspace())
    true = torch.autograd.grad(outputs[used], list(layer.parameters()), deltas[used])
    for (name, _), grad in zip(layer.named_parameters(), true, strict=True):
        torch.testing.assert_close(found[name][0], grad, rtol=1e-10, atol=1e-13)
