"""What a user's ``weight_decay`` is: decoupled from the gradient, or an L2 penalty, which states a prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_bayes.optim.hyperparameters import DecayKind

_DECOUPLED = ("Adafactor", "Muon", "Lion", "Adan", "SophiaG", "Tiger")  # and names with "AdamW" or a final "W"
_PENALISED = ("SGD", "ASGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop")
_PENALISED_CLASSES = tuple(getattr(torch.optim, name) for name in _PENALISED)


def decay_kind(optimizer: Optimizer, group: Mapping[str, Any], *, states_precision: bool) -> DecayKind:
    """What a group's ``weight_decay`` is."""
    name, says = type(optimizer).__name__, group.get("decoupled_weight_decay")
    is_torch_adamw = isinstance(optimizer, torch.optim.AdamW)  # no group of the oldest torch says so
    if says or is_torch_adamw or "AdamW" in name or name.endswith("W") or name in _DECOUPLED:
        return "decoupled"
    if says is None and not isinstance(optimizer, _PENALISED_CLASSES):
        return "unknown"
    return "replaced" if states_precision else "prior"
