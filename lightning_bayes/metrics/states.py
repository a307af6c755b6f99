"""List states of metrics that store one value per example."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat


def concatenated(metric: Metric, name: str) -> Tensor:
    """Concatenate the list state `name`, ``[examples]``; empty without batches, where torchmetrics raises an error."""
    state = getattr(metric, name)
    if isinstance(state, list) and not state:
        return torch.empty(0, dtype=metric.dtype, device=metric.device)
    return dim_zero_cat(state)
