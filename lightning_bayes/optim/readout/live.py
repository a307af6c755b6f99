"""The posterior of a model that its optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_bayes.curvature.spread import free_gathered, whole
from lightning_bayes.optim.readout.shape import damping_of, determined
from lightning_bayes.optim.readout.state import Entry, WeightPosterior, posterior_of
from lightning_bayes.optim.runtime.shards import whole_state


def posterior_of_model(
    model: nn.Module,
    trained: Iterable[tuple[Mapping[str, Any], nn.Parameter]],
    states: Mapping[Tensor, Mapping[str, Any]],
) -> WeightPosterior:
    """Read the posterior of a model; under FSDP2 all processes have to call it together.

    Args:
        model: The model, at its mean.
        trained: Its trained parameters, with their groups.
        states: Their optimizer states.

    Returns:
        Copies of mean and precision by name; parameters without noise and buffers are among the constants.
    """
    free_gathered(model)
    names = {param: name for name, param in model.named_parameters()}
    found = posterior_of(Entry(names[p], whole(p), group, whole_state(states[p])) for group, p in trained)
    others = {n: v for n, v in model.state_dict().items() if n not in found.mean and isinstance(v, Tensor)}
    return replace(found, constants={name: whole(value).detach().clone() for name, value in others.items()})


def determined_of(group: Mapping[str, Any], state: Mapping[str, Any], param: nn.Parameter) -> Tensor:
    """The number of a tensor's parameters that the data determine; under FSDP2 as `posterior_of_model`.

    Args:
        group: Its parameter group.
        state: Its optimizer state, with a curvature.
        param: The tensor.

    Returns:
        A scalar.
    """
    return determined(whole(state["curvature"]), damping_of(group, state, param.detach()))
