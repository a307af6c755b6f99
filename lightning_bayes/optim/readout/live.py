"""The posterior of a model in training, from its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_bayes.curvature.sharding import free_gathered, whole
from lightning_bayes.optim.readout.state import Entry, WeightPosterior, posterior_of
from lightning_bayes.optim.runtime.shards import whole_state


def posterior_of_model(
    model: nn.Module,
    trained: Iterable[tuple[Mapping[str, Any], nn.Parameter]],
    states: Mapping[Tensor, Mapping[str, Any]],
) -> WeightPosterior:
    """Read the posterior of a model; under FSDP2 all processes must call it together.

    Args:
        model: The model, at its posterior mean.
        trained: Its trained parameters with their groups.
        states: Optimizer states by parameter.

    Returns:
        Copies of mean and precision by name; parameters without noise and buffers are among the constants.
    """
    free_gathered(model)
    names = {param: name for name, param in model.named_parameters()}
    entries = (Entry(names[param], whole(param), group, whole_state(states[param])) for group, param in trained)
    posterior = posterior_of(entries)
    constants = {
        name: whole(value).detach().clone()
        for name, value in model.state_dict().items()
        if name not in posterior.mean and isinstance(value, Tensor)
    }
    return replace(posterior, constants=constants)
