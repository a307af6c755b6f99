"""K-FAC's pure update, its damping, step length and intervals against dense linear algebra and hand values."""

from __future__ import annotations

import pytest
import torch
from kronecker_layers import start, take_step
from random_matrices import F64, normal, seeded, spd
from torch import nn

from lightning_bayes.errors import HyperparameterError, NotPositiveDefiniteError
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim import KFAC, ExponentialSchedule
from lightning_bayes.optim.kronecker import equations
from lightning_bayes.optim.kronecker.curvature import is_due
from lightning_bayes.optim.kronecker.moves import clipped_lr, fisher_norm

PRIOR, DAMPING = 0.02, 0.05


def curvature(generator, *batch):
    return KroneckerProduct(spd(2, *batch, generator=generator), spd(3, *batch, generator=generator))


def state(seed, *batch):
    generator = seeded(seed)
    mean = normal(*batch, 2, 3, generator=generator)
    return start(mean, curvature(generator, *batch), prior=PRIOR, damping=DAMPING)


def test_groups_are_updated_each_on_its_own():
    old, grad = state(0, 2), normal(2, 2, 3, generator=seeded(1))
    (new,) = take_step([old], [grad], lr=0.3, prior=PRIOR)
    for g in range(2):
        one = start(old.mean[g], KroneckerProduct(*(f[g] for f in old.curvature)), prior=PRIOR, damping=DAMPING)
        torch.testing.assert_close(take_step([one], [grad[g]], lr=0.3, prior=PRIOR)[0].mean, new.mean[g])


def test_momentum_is_a_corrected_average_of_gradients_with_the_prior():
    at, total = state(0), torch.zeros(2, 3, dtype=F64)
    for step in range(1, 5):
        grad = normal(2, 3, generator=seeded(step))
        total = 0.9 * total + 0.1 * (grad + PRIOR * at.mean)
        expected = at.mean - 0.1 * at.inverse.matvec(total / (1 - 0.9**step))
        (at,) = take_step([at], [grad], lr=0.1, beta=0.9, prior=PRIOR, step=step)
        torch.testing.assert_close(at.mean, expected)


def test_the_update_is_pure():
    old, grad = state(0), normal(2, 3, generator=seeded(1))
    state_of_step = equations.KFACState(old.mean, old.momentum, old.inverse)
    before = [t.clone() for t in (old.mean, old.momentum, *old.inverse, grad)]
    equations.update(state_of_step, grad, beta=0.9, prior=PRIOR)
    assert all(map(torch.equal, before, (old.mean, old.momentum, *old.inverse, grad)))


def test_a_singular_factor_without_prior_and_damping_names_layer_and_factor():
    dead = KroneckerProduct(torch.zeros(2, 2), torch.eye(3))
    with pytest.raises(NotPositiveDefiniteError, match=r"left factor S of layer 'fc1'.*larger damping or prior_precis"):
        equations.damped_inverse(dead, 0.0, "fc1")
    equations.damped_inverse(dead, 1e-4, "fc1")


# -- KL clip: Zhang et al. 2018, eq. 26 --


def test_the_clip_by_hand():
    """vᵀFv = 1·3 + 2·0.5 = 4: √(0.01/4) = 0.05."""
    norm = fisher_norm([torch.tensor([[1.0]]), torch.tensor([[2.0]])], [torch.tensor([[3.0]]), torch.tensor([[0.5]])])
    torch.testing.assert_close(norm, torch.tensor(4.0))
    torch.testing.assert_close(clipped_lr(0.2, norm, 0.01), torch.tensor(0.05))
    torch.testing.assert_close(clipped_lr(0.02, norm, 0.01), torch.tensor(0.02))
    assert clipped_lr(0.02, torch.tensor(0.0), 0.01) == pytest.approx(0.02)


def test_the_clip_decays_with_the_epochs():
    bound = ExponentialSchedule(0.01, 0.95, every=7)  # updates per epoch
    assert [bound(7 * k) for k in (0, 1, 10)] == pytest.approx([0.01, 0.0095, 0.01 * 0.95**10])


# -- intervals --


def test_two_refresh_intervals_with_layers_taking_turns():
    due = {offset: [step for step in range(1, 10) if is_due(step, 4, offset)] for offset in range(4)}
    assert due == {0: [1, 5, 9], 1: [1, 2, 6], 2: [1, 3, 7], 3: [1, 4, 8]}


@pytest.mark.parametrize(
    ("stats", "inverse", "message"),
    [
        (0, 5, r"^stats_interval=0 must be a whole number of at least 1\.$"),
        (1.5, -2, r"^stats_interval=1\.5 must .*; inverse_interval=-2 must be a whole number of at least 1\.$"),
        (10, 5, r"inverse_interval=5 is below stats_interval=10: .*Use inverse_interval=10 or more"),
    ],
)
def test_intervals_that_make_no_sense_are_refused(stats, inverse, message):
    with pytest.raises(HyperparameterError, match=message):
        KFAC(nn.Linear(2, 1), stats_interval=stats, inverse_interval=inverse)
