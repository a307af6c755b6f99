"""Optimizers and updates as a callback with default arguments runs them in a single process."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from benchmarks.speed.models import Task
from lightning_bayes.optim import NoisyOptimizer, VariationalOptimizer
from lightning_bayes.optim.steps import BaseOptimizerStep

LR = 1e-4
NUM_DATA = 50_000
NOISE = 0.3  # κ, the default for networks with convolutions

OptimizerT = TypeVar("OptimizerT", bound=VariationalOptimizer)


def as_swapped(method: type[OptimizerT], task: Task, grafts: bool = False, **arguments: Any) -> OptimizerT:
    """Build an optimizer whose mean is updated by torch's Adam, without an explicit prior.

    Args:
        method: The optimizer class.
        task: The model and its batch.
        grafts: Whether Adam sets only the length of the step, as with ``step="natural"``.
        **arguments: Further arguments of the optimizer.

    Returns:
        The optimizer.
    """
    base = BaseOptimizerStep(torch.optim.Adam(task.model.parameters(), lr=LR), grafts=grafts)
    optimizer = method(task.model, base=base, num_data=NUM_DATA, relative_noise=NOISE, **arguments)
    for group in optimizer.param_groups:
        group["prior_on_mean"] = False
    return optimizer


def update_once(optimizer: NoisyOptimizer, task: Task) -> None:
    """Clear the gradients, run a pass over the task's batch, and step."""
    optimizer.zero_grad()
    with optimizer.measured_pass(0, is_only_batch=True) as captured:
        loss = task.loss()
        captured.observe(loss)
        loss.backward()
    optimizer.step()
