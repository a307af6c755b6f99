"""Messages for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.curvature.spread import local
from lightning_bayes.errors import name_some

_ROOM = 60  # characters for names


def overflown(
    model: nn.Module,
    params: Iterable[nn.Parameter],
    tensors_of: Callable[[nn.Parameter], Iterable[Tensor]],
    *,
    spread: bool,
) -> list[str]:
    """Names of the parameters whose weights or state are not finite.

    Args:
        model: The model.
        params: Its parameters, in an order that all processes share.
        tensors_of: Weights and state of one.
        spread: Whether they are spread over processes, each of which then learns of the others' rows.

    Returns:
        The names.
    """
    names = {param: name for name, param in model.named_parameters()}
    finite = {
        names[param]: torch.stack([local(value).isfinite().all() for value in tensors_of(param)]).all()
        for param in params
    }
    are_finite = torch.stack(list(finite.values()))
    if spread:
        dist.all_reduce(are_finite := are_finite.int(), dist.ReduceOp.MIN)
    return [name for name, is_finite in zip(finite, are_finite.tolist(), strict=True) if not is_finite]


def overflow(names: Iterable[str], number: int, group: Mapping[str, Any]) -> str:
    """The message of an update that overflowed, or one before it.

    Args:
        names: Its parameters.
        number: Number of updates so far.
        group: A parameter group.

    Returns:
        The message.
    """
    return (
        f"Update {number} or one before left numbers that are not finite in the weights or the state of "
        f"{name_some(names, _ROOM)}, although its gradients were finite: it was too large for its precision. Go on from "
        f"an earlier checkpoint, with a smaller lr ({group['lr']}), kl_weight ({group['kl_weight']}) or prior_precision "
        f"({group['prior_precision']})."
    )


def skipped(model: nn.Module, number: int, in_a_row: int) -> str:
    """The warning of an update that is skipped.

    Args:
        model: The model, with the update's gradients.
        number: Number of the update, from 1.
        in_a_row: How many were skipped in a row.

    Returns:
        The text.
    """
    gradients = ((name, param.grad) for name, param in model.named_parameters() if param.grad is not None)
    culprits = [name for name, grad in gradients if not local(grad).isfinite().all()] or ["none"]
    return (
        f"Update {number} has a gradient or curvature that is not finite (gradients of {name_some(culprits, _ROOM)}); it is "
        f"skipped, the posterior is unchanged ({in_a_row} in a row). Look for NaN in the batch, or lower the learning rate."
    )
