"""Whether the targets of a batch are those of its training loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihood.loss_functions import LossCall


def changed_targets(batch: Any, targets: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The sorted values that a training step gave its loss, and those of the batch, if it changed them."""
    given = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if not isinstance(given, Tensor):
        return None
    of_batch = given.flatten().double().sort().values
    used = [each.flatten().to(of_batch).sort().values for each in targets if each.numel() == given.numel()]
    if not used or any(torch.allclose(each, of_batch, equal_nan=True) for each in used):
        return None
    return used[0], of_batch


def obstacle_of(targets: Tensor, calls: list[LossCall]) -> str:
    """Why a loss shows that the targets of a batch are not its own; empty if it does not."""
    if any(call.counted is not None and not bool(call.counted.all()) for call in calls):
        return "the loss ignores some targets"
    used = [call.targets.detach() for call in calls if call.targets is not None]
    return (
        "" if changed_targets((None, targets), used) is None else "the training step changes the targets of its batch"
    )
