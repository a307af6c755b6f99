"""What the validation and test step of a classifier return, for callbacks that look at predictions."""

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
    """Read what a step has returned.

    Args:
        module: The module.
        step: Name of its step.
        returned: A mapping with ``outputs``, logits ``[samples, batch, classes]`` or ``[batch, classes]``, and ``targets``.

    Returns:
        Both, on the CPU.

    Raises:
        UnsupportedTrainingError: If it is something else.
    """
    if not has_step_outputs(returned):
        raise UnsupportedTrainingError(
            f"Logits are read from what {type(module).__name__}.{step} returns, which is a {type(returned).__name__} "
            'without them. Return {"outputs": logits, "targets": targets}, as lightning_bayes.zoo.BayesClassifier does.'
        )
    outputs = returned["outputs"].detach().cpu()
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return StepOutputs(outputs if outputs.ndim == 3 else outputs.unsqueeze(0), returned["targets"].detach().cpu())


def has_step_outputs(returned: Any) -> bool:
    """Whether a step has returned logits and targets.

    Args:
        returned: What it has returned.

    Returns:
        Whether `step_outputs` can read it.
    """
    if not isinstance(returned, Mapping):
        return False
    outputs, targets = returned.get("outputs"), returned.get("targets")
    return isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim in {2, 3}
