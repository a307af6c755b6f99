"""The state of a parameter before its first update, from what its model and its group say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from lightning_bayes.curvature.parameters import rows_without_gradient
from lightning_bayes.optim.parameters import deterministic_params, reference_weights, require_initialised
from lightning_bayes.optim.weight_prior import prior_state, weight_priors
from lightning_bayes.posteriors import AbstractPosterior, root_mean_squares


@final
class StartingStates:
    """Starts the states of a model's parameters; `norms` says whether normalisation layers have a posterior."""

    def __init__(self, model: nn.Module, *, bayesian: str | None, prior: AbstractPosterior | None, norms: bool) -> None:
        require_initialised(model)
        self.deterministic = deterministic_params(model, bayesian, norms=norms)
        self.weight_priors = weight_priors(model, prior)
        self._reference, self._rows = reference_weights(model), rows_without_gradient(model)

    def new(self, param: nn.Parameter, group: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
        """The state of a parameter; `fields` name the tensors that are shaped like it, which start at zero."""
        size = root_mean_squares([self._reference.get(param, param).detach()])[0]
        state: dict[str, Any] = {
            "step": 0,
            "noisy": param not in self.deterministic,
            "initial_rms": torch.where(size > 0, size, torch.ones_like(size)),
        }
        state |= {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in fields}
        state |= prior_state(param, group, self.weight_priors)
        if param in self._rows:
            state["rows_without_noise"] = self._rows[param].nonzero()[:, 0].tolist()
        return state
