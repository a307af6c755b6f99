"""When the stored covariance is refreshed, and what it then says, against the schedule and the formula by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bayes.optim import VOGN
from lightning_bayes.optim.covariance.diagonal import is_refreshed


def test_the_noise_of_the_bound_is_refreshed_in_every_update():
    assert all(is_refreshed(step, 1, shaped=False) for step in range(1, 50))


def test_shaped_noise_is_refreshed_in_ten_updates_and_then_in_every_tenth():
    refreshed = [step for step in range(1, 45) if is_refreshed(step, 1, shaped=True)]
    assert refreshed == [*range(1, 11), 20, 30, 40]


@pytest.mark.parametrize(
    ("step", "elapsed", "expected"), [(25, 6, True), (25, 5, False), (40, 25, True), (29, 9, False)]
)
def test_updates_that_were_left_out_count(step, elapsed, expected):
    """After a pause of `elapsed` updates, the shape is stored if a multiple of ten lies within."""
    assert is_refreshed(step, elapsed, shaped=True) is expected


def test_scale_and_damping_are_those_of_the_bound():
    """1/Σ = (Ñ/τ) (s + δ̃ + γ) with Ñ = 50, τ = 1/2, δ̃ = τδ/Ñ = .03, γ = .2 in the noise."""
    model = nn.Linear(2, 1)
    opt = VOGN(
        model,
        lr=0.1,
        num_data=50,
        prior_precision=3.0,
        kl_weight=0.5,
        damping=0.2,
        damping_in_noise=True,
        init_precision=70.0,
    )
    curvature = opt.state[model.weight]["curvature"]
    precision = opt.posterior().precision["weight"]
    torch.testing.assert_close(precision, 100 * (curvature + 0.03 + 0.2))
