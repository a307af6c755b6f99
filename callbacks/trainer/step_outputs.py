"""Outputs and targets of validation and test steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_bayes.errors import UnsupportedTrainingError


class StepOutputs(NamedTuple):
    """Outputs and targets of a batch, on the CPU. Outputs have at least single precision."""

    outputs: Tensor  # logits, [samples, batch, classes], or predictions, [samples, batch, …]
    targets: Tensor  # [batch, …]


def stored(outputs: Tensor, targets: Tensor) -> StepOutputs:
    """Outputs and targets of any device and precision, without their graph."""
    outputs = outputs.detach().cpu()
    return StepOutputs(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), targets.detach().cpu())


def step_outputs(module: LightningModule, step: str, returned: Any) -> StepOutputs:
    """Read the result of a step."""
    if not has_step_outputs(returned):
        raise UnsupportedTrainingError(
            f"{type(module).__name__}.{step} returned a {type(returned).__name__} without logits."
            ' Return {"outputs": logits, "targets": targets}, as lightning_bayes.zoo.BayesClassifier does.'
        )
    outputs = returned["outputs"]
    return stored(outputs if outputs.ndim == 3 else outputs.unsqueeze(0), returned["targets"])


def has_class_outputs(returned: Any) -> bool:
    """Whether a step returned the logits of a classifier, ``[…, batch, classes]``, and one class index per example."""
    if not has_step_outputs(returned):
        return False
    outputs, targets = returned["outputs"], returned["targets"]
    is_index = targets.ndim == 1 and not targets.is_floating_point() and not targets.is_complex()
    return bool(is_index and outputs.shape[-1] > 1 and outputs.shape[-2] == len(targets))


def has_labels(returned: Any, of_classes: bool = True) -> bool:
    """Whether a classifier's outputs are finite, and its targets are `of_classes` that it knows."""
    outputs, targets = returned["outputs"], returned["targets"]
    inside = (targets >= 0) & (targets < outputs.shape[-1])
    return bool(outputs.isfinite().all()) and (not of_classes or bool(inside.all()))


def has_step_outputs(returned: Any) -> bool:
    """Whether a step returned logits and targets, so that `step_outputs` can read them."""
    if not isinstance(returned, Mapping):
        return False
    outputs, targets = returned.get("outputs"), returned.get("targets")
    return isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim in {2, 3}
