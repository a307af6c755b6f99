"""Where the examples lie is told by gradients; a layer whose gradient is zero is asked again in the next pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import mean_squares
from torch import nn

from lightning_bayes import VOGN
from lightning_bayes.curvature.layouts import keeps_chosen

CHOSEN = torch.tensor([True, False, True, False])


@pytest.fixture
def batch(generator):
    return torch.randn(4, 5, generator=generator).clamp(-1, 1).index_fill(1, torch.tensor([0]), 1.0)  # 1 is the largest


@pytest.mark.parametrize(("error", "is_kept"), [(0.0, True), (0.03, True), (0.1, False), (0.4, False)])
def test_the_gradients_of_chosen_examples_may_differ_by_rounding_to_half_precision(batch, error, is_kept):
    """Rounding to bfloat16 adds up to some per cent of the largest gradient. Mixed rows differ by more."""
    grad = torch.where(CHOSEN[:, None], batch, 0)
    grad[2, 3] += error
    assert keeps_chosen(batch, grad, CHOSEN) is is_kept


@pytest.mark.parametrize(("leak", "is_kept"), [(0.0, True), (1e-7, True), (1e-5, False), (0.03, False)])
def test_the_other_examples_get_no_gradient_at_all(batch, leak, is_kept):
    grad = torch.where(CHOSEN[:, None], batch, 0)
    grad[1, 3] += leak
    assert keeps_chosen(batch, grad, CHOSEN) is is_kept


class SequenceFirst(nn.Module):
    """As many positions as examples, in the order [position, example], behind a head that is zero at first."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))


def test_a_layout_that_a_zero_gradient_hid_is_found_in_a_later_pass(generator):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SequenceFirst().double()
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = VOGN(model, base=base, num_data=100, relative_noise=1e-30, curvature_interval=1)
    by_update, y = [], torch.arange(4) % 2
    for _ in range(3):
        x = torch.randn(4, 4, 3, dtype=torch.float64, generator=generator)
        by_update.append(mean_squares(model, (F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(4))))
        optimizer.zero_grad()
        with optimizer.sampled_params():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not by_update[0]["layer.weight"].any()
    for name, param in model.named_parameters():
        expected = torch.stack([truth[name] for truth in by_update]).mean(0)
        torch.testing.assert_close(optimizer.state[param]["curvature"], expected, rtol=1e-6, atol=1e-12)
