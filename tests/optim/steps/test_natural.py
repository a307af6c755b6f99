"""The papers' step, on a cohort that moves as the test says."""

from __future__ import annotations

import torch
from recorded_cohort import RecordedCohort

from lightning_bayes.optim.steps import NaturalStep


def test_it_takes_the_algorithms_own_update():
    cohort = RecordedCohort([torch.ones(2)], [torch.tensor([1.0, -2.0])])
    NaturalStep().apply(cohort)
    assert cohort.calls == [("move_",)]
    torch.testing.assert_close(cohort.params[0].detach(), torch.tensor([2.0, -1.0]))


def test_weights_decay_before_the_update():
    cohort = RecordedCohort([torch.full((1,), 2.0)], [torch.ones(1)])
    cohort.group |= {"lr": 0.1, "weight_decay": 0.5}
    NaturalStep().apply(cohort)
    torch.testing.assert_close(cohort.params[0].detach(), torch.tensor([2.0 * 0.95 + 1.0]))


def test_the_papers_average_has_a_constant_weight():
    assert [NaturalStep().weight_of_old(0.9, count) for count in (1, 2, 1000)] == [0.9, 0.9, 0.9]
