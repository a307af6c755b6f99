"""The optimizer state of single parameters: how it starts, and which of them are updated together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.spread import whole
from lightning_bayes.posteriors import root_mean_squares, tensor_sizes


def start_state(param: nn.Parameter, kept: Sequence[str], reference: Tensor, *, noisy: bool) -> dict[str, Any]:
    """The state before the first update.

    Args:
        param: The parameter.
        kept: Names of the tensors that are shaped like it; they start at zero.
        reference: The tensor that tells its size; 1 where that is zero.
        noisy: Whether it has a posterior.

    Returns:
        The state by name.
    """
    size = root_mean_squares([whole(reference.detach())])[0]
    state: dict[str, Any] = {"step": 0, "noisy": noisy, "scale": torch.where(size > 0, size, torch.ones_like(size))}
    state |= {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in kept}
    return state


def cohorts_of(
    params: Iterable[nn.Parameter], state_of: Callable[[nn.Parameter], Mapping[str, Any]]
) -> list[list[nn.Parameter]]:
    """Trainable parameters, alike in device, dtype, number of updates, having a curvature, and having priors of weights.

    Args:
        params: The parameters.
        state_of: The state of each.

    Returns:
        The cohorts.
    """
    alike: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        if param.requires_grad:
            state = state_of(param)
            kept = ("curvature" in state, "prior_precision" in state)
            alike.setdefault((param.device, param.dtype, state["step"], *kept), []).append(param)
    return list(alike.values())


def forget(state: dict[str, Any], names: Iterable[str]) -> None:
    """Drop what older files hold of a parameter and its step does not need.

    Args:
        state: Its state, changed in place.
        names: The entries to drop.
    """
    for name in names:
        state.pop(name, None)


@torch.no_grad()
def take_sizes(params: Sequence[nn.Parameter], states: Sequence[dict[str, Any]]) -> None:
    """Keep the sizes of parameters, r_t, in their states.

    Args:
        params: Parameters of one device and dtype; their values are μ.
        states: Their states, changed in place.
    """
    sizes = tensor_sizes(list(params), [state["scale"] for state in states])
    for state, size in zip(states, sizes.unbind(), strict=True):
        state["size"] = size
