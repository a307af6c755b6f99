"""The step within a trust region, on an update that proposes what the test says."""

from __future__ import annotations

import torch
from recorded_update import RecordedUpdate

from lightning_bayes.optim.steps import NATURAL_RATE, TrustRegionStep


def test_a_long_step_is_shortened_to_the_users_and_a_short_one_is_taken():
    update = RecordedUpdate([torch.zeros(2), torch.zeros(2)], [torch.tensor([3.0, -4.0]), torch.tensor([1e-3, 0.0])])
    update.group |= {"lr": 0.1}
    TrustRegionStep().apply(update)
    long, short = (param.detach() for param in update.params)
    torch.testing.assert_close(long.square().mean().sqrt(), torch.tensor(0.1))
    torch.testing.assert_close(long / long.norm(), torch.tensor([0.6, -0.8]))
    torch.testing.assert_close(short, torch.tensor([1e-3, 0.0]))


def test_with_sgd_the_bound_is_the_length_that_all_of_its_momentum_moves():
    update = RecordedUpdate([torch.zeros(2)], [torch.tensor([30.0, 40.0])], index=3)
    update.group |= {"lr": 0.01, "momentum": 0.5}
    update.group["posterior"] |= {"radius": "sgd", "betas": (0.8, 0.99)}
    update.states[0]["momentum"] = torch.tensor([3.0, 4.0])
    TrustRegionStep().apply(update)
    debiased = torch.tensor([3.0, 4.0]).square().mean().sqrt() / (1 - 0.8**3)
    torch.testing.assert_close(update.params[0].square().mean().sqrt(), 0.01 * debiased / 0.5)


def test_proposals_are_taken_at_a_fixed_rate():
    update = RecordedUpdate([torch.zeros(1)], [torch.ones(1)])
    TrustRegionStep().apply(update)
    assert update.calls == [("propose_", NATURAL_RATE)]


def test_weights_decay_before_the_step():
    update = RecordedUpdate([torch.full((2,), 2.0)], [torch.zeros(2)])
    update.group |= {"lr": 0.1, "weight_decay": 0.5}
    TrustRegionStep().apply(update)
    torch.testing.assert_close(update.params[0].detach(), torch.full((2,), 1.9))
