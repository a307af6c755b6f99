"""Optimizer state of single parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.sharding import whole
from lightning_bayes.posteriors import root_mean_squares


def state_fields(state_type: Any, *, updates_mean: bool, is_deterministic: bool, needs_momentum: bool) -> Sequence[str]:
    """Names of the tensors that a parameter's state needs.

    Args:
        state_type: The algorithm's state, a NamedTuple that begins with the mean.
        updates_mean: Whether the algorithm's own update moves the mean, rather than another optimizer.
        is_deterministic: Whether the parameter has no posterior.
        needs_momentum: Whether the algorithm cannot update its curvature alone.

    Returns:
        The names.
    """
    fields: Sequence[str] = state_type._fields[1:]
    if updates_mean:
        return fields
    if is_deterministic:
        return ()
    return fields if needs_momentum else ("curvature",)


def start_state(param: nn.Parameter, fields: Sequence[str], reference: Tensor, *, noisy: bool) -> dict[str, Any]:
    """The state before the first update.

    Args:
        param: The parameter.
        fields: Names of the tensors that are shaped like it. They start at zero.
        reference: The tensor whose root mean square is the parameter's initial size; 1 if that is zero.
        noisy: Whether the parameter has a posterior.

    Returns:
        The state by name.
    """
    size = root_mean_squares([whole(reference.detach())])[0]
    state: dict[str, Any] = {"step": 0, "noisy": noisy, "scale": torch.where(size > 0, size, torch.ones_like(size))}
    state |= {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in fields}
    return state


def forget(state: dict[str, Any], names: Iterable[str]) -> None:
    """Drop entries that older checkpoints contain and the current step does not need.

    Args:
        state: The state of a parameter, changed in place.
        names: The entries to drop.
    """
    for name in names:
        state.pop(name, None)
