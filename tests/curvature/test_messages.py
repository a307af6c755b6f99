"""Refusals begin with the culprit and the advice, in at most 600 characters, however large the model is."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import BayesError

LAYERS = 60


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale - (x * self.scale).mean(0)


class Loss(nn.Module):
    """Returns the loss, so that nothing between it and the layer shows how it reduces."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.scale).square().mean()


def many_linear(kind=nn.Sequential):
    return kind(*(nn.Linear(4, 4) for _ in range(LAYERS)))


CASES = {  # a model, its input, a loss of its outputs, the culprit
    "a module that mixes": (
        lambda: nn.Sequential(Mixing()),
        torch.randn(5, 4),
        lambda out: out.square().mean(),
        "Mixing",
    ),
    "a loss inside": (
        lambda: nn.ModuleList([Loss()]),
        torch.randn(5, 4),
        lambda out: out,
        "0.scale",
    ),
    "a ratio": (
        many_linear,
        torch.randn(5, 4),
        lambda out: out.sum() / out.exp().sum(),
        "The loss is",
    ),
    "a rescaled sum": (
        many_linear,
        torch.randn(5, 4),
        lambda out: out.square().sum() / 37,
        "is a sum rescaled by 1/37",
    ),
    "other rows in the loss": (many_linear, torch.randn(5, 4), lambda out: out[:3].square().mean(), "[3, 4]"),
}


@pytest.mark.parametrize("name", CASES)
def test_refusals_are_short_and_begin_with_the_culprit(name):
    build, x, loss, culprit = CASES[name]
    model = build()
    call = model[0] if isinstance(model, nn.ModuleList) else model
    with pytest.raises(BayesError) as caught:
        measure(model, lambda: loss(call(x)))
    text = str(caught.value)
    assert len(text) <= 600
    assert 0 <= text.find(culprit) < 120
    assert re.search(r"(Keep|Move|Pass|Choose|Give|Use|Write) ", text[:450])
    assert not re.search(r"Measured|BackwardHook|vmap|0x", text)
