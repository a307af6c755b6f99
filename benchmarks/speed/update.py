"""Optimizers and updates as a callback without arguments has them in a single process."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from benchmarks.speed.models import Task
from lightning_bayes.optim import MeanFieldOptimizer, NoisyOptimizer
from lightning_bayes.optim.steps import BaseOptimizerStep

LR = 1e-4
NUM_DATA = 50_000
NOISE = 0.3  # κ, as of networks with convolutions

OptimizerT = TypeVar("OptimizerT", bound=MeanFieldOptimizer)


def as_swapped(method: type[OptimizerT], task: Task, grafts: bool = False, **arguments: Any) -> OptimizerT:
    """An optimizer whose mean torch's Adam moves, without a stated prior.

    Args:
        method: Its class.
        task: The model.
        grafts: Whether Adam gives the length of a step only, as under ``step="natural"``.
        **arguments: Of the optimizer.

    Returns:
        The optimizer.
    """
    base = BaseOptimizerStep(torch.optim.Adam(task.model.parameters(), lr=LR), grafts=grafts)
    optimizer = method(task.model, base=base, num_data=NUM_DATA, relative_noise=NOISE, **arguments)
    for group in optimizer.param_groups:
        group["prior_on_mean"] = False
    return optimizer


def update_once(optimizer: NoisyOptimizer, task: Task) -> None:
    """Clear the gradients, run one pass over the task's batch, the only one of the update, and step.

    Args:
        optimizer: Of the task's model.
        task: The model and its batch.
    """
    optimizer.zero_grad()
    with optimizer.measured_pass(0, is_only_batch=True) as captured:
        loss = task.loss()
        captured.observe(loss)
        loss.backward()
    optimizer.step()
