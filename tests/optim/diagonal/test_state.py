"""The operations that mean-field methods share, against arithmetic by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.optim.diagonal.signed_curvature import keep_positive
from lightning_bayes.optim.diagonal.state import average, debiased, with_prior


def test_an_average_weights_the_old_by_beta():
    assert average(torch.tensor(2.0), torch.tensor(6.0), 0.75).item() == 3.0


def test_the_first_debiased_momentum_is_the_gradient_and_a_constant_stays():
    momentum = torch.tensor(0.0)
    for step in range(1, 6):
        momentum = average(momentum, torch.tensor(5.0), 0.9)
        assert debiased(momentum, 0.9, step).item() == pytest.approx(5.0)


@pytest.mark.parametrize("prior", [0.5, torch.tensor([0.5, 0.5])])
def test_the_prior_pulls_by_its_precision(prior):
    found = with_prior(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -4.0]), prior)
    assert found.tolist() == [3.0, 0.0]


def test_the_smallest_precision_is_a_thousandth_of_the_priors():
    """s + δ̃ ≥ δ̃ / 1000 for δ̃ = 2; larger values stay."""
    found = keep_positive(torch.tensor([-5.0, -1.0, 3.0], dtype=torch.float64), 2.0)
    torch.testing.assert_close(found + 2.0, torch.tensor([0.002, 1.0, 5.0], dtype=torch.float64))
