"""What BackPACK's hooks forbid is said with the layer's name, and what they leave behind is taken away."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import UnsupportedTrainingError


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(4, 4), nn.Linear(4, 3), change

    def forward(self, x):
        hidden = self.first(x)
        self.change(hidden)
        return self.last(hidden)


def zero_first(hidden):
    hidden[:, 0] = 0.0


CHANGES = {"whole": torch.relu_, "entry": zero_first, "view": lambda hidden: hidden.view(-1, 2, 2).add_(1)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_in_place_is_refused_by_name(change, generator):
    model, x = Changed(change), torch.randn(5, 4, generator=generator)
    with pytest.raises(UnsupportedTrainingError, match=r"in place .*after first \(Linear\) was called.*avoid BackPACK"):
        measure(model, lambda: F.mse_loss(model(x), torch.zeros(5, 3)), "diag_ggn", engine="backpack")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_squares_are_right_after_any_change_in_place(change, generator):
    model, x = Changed(change).double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    _, square = one_example_at_a_time(model, list(x), lambda m, e: m(e[None]).square().mean())
    for engine in ("fused", "backpack"):
        found = measure(model, lambda: model(x).square().mean(), engine=engine).curvature
        assert relative_error(found, square) < 1e-10


def test_attributes_named_like_backpacks_are_given_back(generator):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(5, 4, generator=generator)
    model[0].output, model[2].input0 = "mine", "mine too"
    measure(model, lambda: F.mse_loss(model(x), torch.zeros(5, 3)), "diag_ggn", engine="backpack")
    assert (model[0].output, model[2].input0) == ("mine", "mine too")
    assert not hasattr(model[0], "input0")
    assert not hasattr(model[2], "output")
