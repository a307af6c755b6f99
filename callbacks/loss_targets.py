"""Whether a training step passes the targets of its batch to the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError


def require_targets_of_batch(batch: Any, targets: list[Tensor]) -> None:
    """Refuse a training step that changes the targets' values, such as their unit: Laplace reads those of the batch."""
    given = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if not isinstance(given, Tensor):
        return
    of_batch = given.flatten().double().sort().values
    used = [each.flatten().to(of_batch).sort().values for each in targets if each.numel() == given.numel()]
    if used and not any(torch.allclose(each, of_batch, equal_nan=True) for each in used):
        raise UnsupportedTrainingError(
            f"The loss gets targets from {float(used[0][0]):.4g} to {float(used[0][-1]):.4g}, but those of the batch are "
            f"from {float(of_batch[0]):.4g} to {float(of_batch[-1]):.4g}, and Laplace reads them there. Standardise or "
            "shift the targets in the data set."
        )
