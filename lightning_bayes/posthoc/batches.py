"""Batches of training data, and what a Laplace approximation asks of the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.errors import DataError, UnsupportedTrainingError, name_some
from lightning_bayes.predictive import dropout_layers


def labelled(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """The batches of a loader on a device.

    Args:
        loader: A loader of pairs (inputs, targets).
        device: Where the model is.

    Yields:
        Inputs and targets.

    Raises:
        DataError: If a batch is no such pair, or there is none.
    """
    seen = False
    for batch in loader:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise DataError(
                f"The loader gives batches without labels, such as a {type(batch).__name__}, but the curvature and the "
                "marginal likelihood need them. Let it give pairs (inputs, targets) of tensors."
            )
        seen = True
        yield _moved(batch[0], device), batch[1].to(device)
    if not seen:
        raise DataError(
            "The loader gives no batch. Pass the training data, and a new loader if this one was an iterator."
        )


def require_evaluation_mode(model: nn.Module) -> None:
    """Require a network whose outputs for one example are its own.

    Args:
        model: The network.

    Raises:
        UnsupportedTrainingError: If BatchNorm or dropout is in training mode.
    """
    by_chance = {module for module in dropout_layers(model) if module.training and getattr(module, "p", 1) > 0}
    found = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if uses_batch_statistics(module) or module in by_chance
    ]
    if found:
        raise UnsupportedTrainingError(
            f"{name_some(found)} is in training mode, where outputs depend on the rest of the batch or on chance. Call "
            "model.eval() first; BatchNorm needs its running statistics."
        )


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_moved(each, device) for each in inputs)
    return {key: _moved(value, device) for key, value in inputs.items()} if isinstance(inputs, dict) else inputs
