"""The results of a classifier's validation and test steps, for callbacks that use predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError


class StepOutputs(NamedTuple):
    """Logits and targets of a batch, on the CPU."""

    outputs: Tensor  # [samples, batch, classes], in at least single precision
    targets: Tensor  # [batch]


def step_outputs(module: LightningModule, step: str, returned: Any) -> StepOutputs:
    """Read the result of a step.

    Args:
        module: The module.
        step: Name of its step.
        returned: A mapping with ``outputs``, logits ``[samples, batch, classes]`` or ``[batch, classes]``, and ``targets``.

    Returns:
        Both, on the CPU.

    Raises:
        UnsupportedTrainingError: If it is anything else.
    """
    if not has_step_outputs(returned):
        raise UnsupportedTrainingError(
            f"{type(module).__name__}.{step} returned a {type(returned).__name__} without logits."
            ' Return {"outputs": logits, "targets": targets}, as lightning_bayes.zoo.BayesClassifier does.'
        )
    outputs = returned["outputs"].detach().cpu()
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return StepOutputs(outputs if outputs.ndim == 3 else outputs.unsqueeze(0), returned["targets"].detach().cpu())


def has_step_outputs(returned: Any) -> bool:
    """Whether a step has returned logits and targets.

    Args:
        returned: The result of a step.

    Returns:
        Whether `step_outputs` can read it.
    """
    if not isinstance(returned, Mapping):
        return False
    outputs, targets = returned.get("outputs"), returned.get("targets")
    return isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim in {2, 3}
