"""States of metrics that keep a value per example in a list of batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat


def concatenated(metric: Metric, name: str) -> Tensor:
    """All values of a list state; none where there was no batch, for which torchmetrics has an error.

    Args:
        metric: The metric.
        name: The state; a tensor once synchronized.

    Returns:
        The values, ``[examples]``.

    Example:
        >>> from lightning_bayes.metrics import AURC
        >>> concatenated(AURC(), "confidence")
        tensor([])
    """
    state = getattr(metric, name)
    if isinstance(state, list) and not state:
        return torch.empty(0, dtype=metric.dtype, device=metric.device)
    return dim_zero_cat(state)
