"""Messages about non-finite weights, state and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.errors import name_some

_NAMES_LENGTH = 60  # characters of names in a message


def nonfinite_params(
    model: nn.Module,
    params: Iterable[nn.Parameter],
    tensors_of: Callable[[nn.Parameter], Iterable[Tensor]],
) -> list[str]:
    """Names of the parameters whose weights or state are not finite."""
    names = {param: name for name, param in model.named_parameters()}
    finite = {
        names[param]: torch.stack([value.isfinite().all() for value in tensors_of(param)]).all() for param in params
    }
    are_finite = torch.stack(list(finite.values()))
    return [name for name, is_finite in zip(finite, are_finite.tolist(), strict=True) if not is_finite]


def overflow_message(names: Iterable[str], number: int, group: Mapping[str, Any]) -> str:
    """The error message for an overflow in the last update or before."""
    settings = group["posterior"]
    return (
        f"Update {number} or an earlier one left non-finite weights or state in {name_some(names, _NAMES_LENGTH)}, although "
        "its gradients were finite: the update overflowed. Resume from an earlier checkpoint with a smaller "
        f"lr ({group['lr']}), kl_weight ({settings['kl_weight']}) or prior_precision ({settings['prior_precision']})."
    )


def skip_message(model: nn.Module, number: int, in_a_row: int) -> str:
    """The warning for a skipped update."""
    gradients = ((name, param.grad) for name, param in model.named_parameters() if param.grad is not None)
    culprits = [name for name, grad in gradients if not grad.isfinite().all()] or ["none"]
    return (
        f"Update {number} has a non-finite gradient or curvature (gradients of {name_some(culprits, _NAMES_LENGTH)}). It is "
        f"skipped and the posterior is unchanged ({in_a_row} in a row). Look for NaN in the batch, or lower the "
        "learning rate."
    )
