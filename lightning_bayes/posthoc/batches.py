"""Batches of labelled data, and the check that a network is in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.errors import DataError, UnsupportedTrainingError, name_some
from lightning_bayes.posteriors.base import moved
from lightning_bayes.predictive import dropout_layers


def labelled(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Yield the batches (inputs, targets) of a loader on `device`; raise a `DataError` for targets that do not suit."""
    index = -1
    for index, batch in enumerate(loader):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise DataError(
                f"The loader yields batches without labels, such as a {type(batch).__name__}, but the curvature and the "
                "marginal likelihood need labels. Let it yield pairs (inputs, targets) of tensors."
            )
        _require_finite(batch[1], index)
        yield moved(batch[0], device), batch[1].to(device)
    if index < 0:
        raise DataError("The loader yields no batch. Pass the training data, and a new loader if this was an iterator.")


def _require_finite(targets: Tensor, index: int) -> None:
    """Raise a `DataError` for targets that are nan or infinite."""
    bad = ~targets.isfinite()
    if bool(bad.any()):
        rows = bad.reshape(len(targets), -1).any(1).nonzero().flatten().tolist() if targets.dim() else [0]
        raise DataError(
            f"{int(bad.sum())} of the {targets.numel()} targets in batch {index} are nan or infinite, the first in row "
            f"{rows[0]}. The likelihood needs every target, also of outputs that the training loss masks. Leave these "
            "examples out of the data, or predict only outputs that all examples have."
        )


def require_evaluation_mode(model: nn.Module) -> None:
    """Raise an `UnsupportedTrainingError` if BatchNorm or dropout is in training mode."""
    random = {module for module in dropout_layers(model) if module.training and getattr(module, "p", 1) > 0}
    unsupported = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if uses_batch_statistics(module) or module in random
    ]
    if unsupported:
        raise UnsupportedTrainingError(
            f"{name_some(unsupported)} is in training mode, where outputs are random or depend on the other examples of the "
            "batch. Call model.eval() first; BatchNorm then uses its running statistics."
        )
