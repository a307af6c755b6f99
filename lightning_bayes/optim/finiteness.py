"""Non-finite weights, state and gradients: errors and warnings that name the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.errors import NonFiniteError, name_some

_NAMES_LENGTH = 60  # characters of names in a message


def require_finite(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, Mapping[str, Any]],
    means: Mapping[nn.Parameter, Tensor],
) -> None:
    """Raise `NonFiniteError` if means or states are not finite; `means` are those of parameters that hold a sample."""
    params, are_finite = [param for group in groups for param in group["params"]], dict[str, Tensor]()
    names = {param: name for name, param in model.named_parameters()}
    for param in params:
        tensors = [means.get(param, param), *(v for v in states.get(param, {}).values() if isinstance(v, Tensor))]
        name = names.get(param, f"a parameter of shape {list(param.shape)}, which the model no longer has")
        are_finite[name] = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    finite = torch.stack(list(are_finite.values())).tolist()
    if culprits := [name for name, is_finite in zip(are_finite, finite, strict=True) if not is_finite]:
        settings = groups[0]["posterior"]
        raise NonFiniteError(
            f"Update {max(group['posterior']['step'] for group in groups)} or an earlier one left non-finite weights or "
            f"state in {name_some(culprits, _NAMES_LENGTH)}, although its gradients were finite: the update overflowed. "
            f"Resume from an earlier checkpoint with a smaller lr ({groups[0]['lr']}), kl_weight "
            f"({settings['kl_weight']}) or prior_precision ({settings['prior_precision']})."
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
