"""The papers' step, on an update that moves as the test says."""

from __future__ import annotations

import torch
from recorded_update import RecordedUpdate

from lightning_bayes.optim.steps import NaturalStep


def test_it_takes_the_algorithms_own_update():
    update = RecordedUpdate([torch.ones(2)], [torch.tensor([1.0, -2.0])])
    NaturalStep().apply(update)
    assert update.calls == [("move_",)]
    torch.testing.assert_close(update.params[0].detach(), torch.tensor([2.0, -1.0]))


def test_weights_decay_before_the_update():
    update = RecordedUpdate([torch.full((1,), 2.0)], [torch.ones(1)])
    update.group |= {"lr": 0.1, "weight_decay": 0.5}
    NaturalStep().apply(update)
    torch.testing.assert_close(update.params[0].detach(), torch.tensor([2.0 * 0.95 + 1.0]))
