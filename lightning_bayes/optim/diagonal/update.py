"""The elementwise update of a mean-field method, applied to the parameters of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.measuring import weight_of_old
from lightning_bayes.optim.steps import CohortUpdate

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


@final
class DiagonalUpdate(CohortUpdate):
    """Applies the pure, elementwise update of a method to parameters of a group that have the same kind of state.

    Args:
        optimizer: The optimizer, whose `natural_update` is applied.
        params: The parameters.
        states: Their states, which count this update already.
        group: Their parameter group.
        measured: ĥ of each parameter; empty if nothing was measured.
        elapsed: e, the number of updates since the previous measurement; 0 if this update measures nothing.
    """

    def __init__(
        self,
        optimizer: VariationalOptimizer,
        params: Sequence[nn.Parameter],
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
        measured: Sequence[Tensor],
        elapsed: int = 1,
    ) -> None:
        self.params, self.states = params, states
        self.group, self.index = group, states[0]["step"]
        self._optimizer, self._measured, self._elapsed = optimizer, measured, elapsed

    @cached_property
    def _weight_of_old(self) -> float:
        """The weight of the old curvature."""
        starts_as_mean = not self._optimizer.step_of(self.group).is_published
        # Without a count, updates between two measurements count too; see `optim.measuring`.
        measurements = self.states[0].get("measurements", self.index)
        beta = self.group["posterior"]["betas"][1]
        return weight_of_old(beta, measurements, self._elapsed, starts_as_mean=starts_as_mean)

    @cached_property
    def _arguments(self) -> Mapping[str, Any]:
        """The keyword arguments of the update with the group's δ."""
        return self._optimizer.update_arguments(self.group, self.index)

    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃, for each weight if every weight has its own prior; see `CohortUpdate`."""
        if "prior_precision" in self.states[0]:
            return [self._arguments_of(state)["prior"] for state in self.states]
        hyper = effective(self.group)
        if self.group["posterior"]["decay"] == "prior" and hyper.penalty:
            return hyper.penalty
        return float(self._arguments["prior"]) if hyper.stated_prior else 0.0

    def move_(self) -> None:
        """Apply the algorithm's update; see `CohortUpdate`."""
        for param, state in zip(self.params, self._new_states({}), strict=True):
            param.copy_(state)

    def propose_(self, lr: float) -> list[Tensor]:
        """Update the state and return the changes of the means; see `CohortUpdate`."""
        return [mean - param for param, mean in zip(self.params, self._new_states({"lr": lr}), strict=True)]

    def average_(self) -> None:
        """Update the curvature alone; see `CohortUpdate`."""
        if not self._elapsed:
            return
        curvatures = [state["curvature"] for state in self.states]
        curvature_update = self._optimizer.curvature_update
        if self._optimizer.averages_curvature:
            torch._foreach_lerp_(curvatures, list(self._measured), 1 - self._weight_of_old)
        elif curvature_update is None:  # the full update, whose changes of the means are discarded
            self._new_states({})
        else:
            accepted = _argument_names(curvature_update)
            for state, measured in zip(self.states, self._measured, strict=True):
                arguments = {name: value for name, value in self._arguments_of(state).items() if name in accepted}
                new = curvature_update(state["curvature"], measured, rate=1 - self._weight_of_old, **arguments)
                state["curvature"].copy_(new)

    def _arguments_of(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keyword arguments for a parameter, with δ̃ of each weight if every weight has its own prior."""
        precision = state.get("prior_precision")
        if precision is None:
            return self._arguments
        return self._optimizer.update_arguments(self.group, self.index, precision)

    def _new_states(self, replaced: Mapping[str, Any]) -> list[Tensor]:
        """Run the update of each parameter with some arguments `replaced`; store the states and return the means."""
        betas, means = (self._arguments["betas"][0], self._weight_of_old), []
        update, state_type = self._optimizer.natural_update, self._optimizer.state_type
        for i, (param, state) in enumerate(zip(self.params, self.states, strict=True)):
            # Updates assume a prior centred at zero, so they get the distance from its mean.
            centre = state.get("prior_mean")
            start = param.detach() if centre is None else param.detach() - centre
            old = state_type(start, *(state[name] for name in state_type._fields[1:]))
            # Averaging s with itself does not change it.
            measured = self._measured[i] if self._measured else state["curvature"]
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            new = update(old, grad, measured, **{**self._arguments_of(state), "betas": betas, **replaced})
            means.append(new.mean if centre is None else new.mean + centre)
            for name, value in zip(state_type._fields[1:], new[1:], strict=True):
                state[name].copy_(value)  # the new state may share memory with the mean
        return means
