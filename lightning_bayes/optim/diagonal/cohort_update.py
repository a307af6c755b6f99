"""The elementwise update of a mean-field method, applied to many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.sharding import local
from lightning_bayes.optim.runtime.blocks import Block, blocks
from lightning_bayes.optim.runtime.shards import local_parts
from lightning_bayes.optim.steps import CohortUpdate


def prior_means(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """μ₀ of each parameter, from its optimizer state; empty if zero."""
    return [state["prior_mean"] for state in states if "prior_mean" in state]


def prior_precisions(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """δ of each weight, from the optimizer states; empty if the group's δ applies."""
    return [state["prior_precision"] for state in states if "prior_precision" in state]


@cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


@final
class DiagonalUpdate(CohortUpdate):
    """Applies a pure, elementwise update to a cohort.

    Args:
        params: Parameters with the same device, dtype and number of updates.
        states: Their optimizer states, which count this update already.
        group: Their parameter group.
        measured: ĥ of each parameter; s if nothing was measured.
        elapsed: e, as in `CohortUpdate`.
        update: The pure update.
        state_type: The type of its state.
        arguments: Returns its keyword arguments, given δ of each weight, or None if the group's δ applies.
        curvature_update: The pure update of the curvature alone; None if there is no separate one.
        only_averages: Whether that update is the plain running average of ĥ.
        buffer: Returns scratch memory for the change of a parameter.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
        measured: Sequence[Tensor],
        elapsed: int = 1,
        *,
        update: Callable[..., Any],
        state_type: Any,
        arguments: Callable[[Tensor | None], Mapping[str, Any]],
        curvature_update: Callable[..., Tensor] | None,
        only_averages: bool,
        buffer: Callable[[nn.Parameter], Tensor],
    ) -> None:
        self.params, self.states = local_parts(params, states)
        self.group, self._owners = group, params
        self._arguments_of, self._arguments = arguments, arguments(None)
        self.prior, self.index, self.elapsed = self._arguments["prior"], self._arguments["step"], elapsed
        self.measurements = self.index
        self.prior_means, self._precisions = prior_means(self.states), prior_precisions(self.states)
        self._measured, self._update, self._state_type, self._buffer = measured, update, state_type, buffer
        self._curvature_update, self._only_averages = curvature_update, only_averages

    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃, for each weight if every weight has its own prior; see `CohortUpdate`."""
        if self._precisions:
            return [self._arguments_of(precision)["prior"] for precision in self._precisions]
        return super().prior_weights()

    def move_(self) -> None:
        """Apply the algorithm's update; see `CohortUpdate`."""
        momentum, curvature = self._arguments["betas"]
        self._run({"betas": (momentum, curvature**self.elapsed)})

    def propose_(self, lr: float, weight_of_old: float) -> list[Tensor]:
        """Update the state and return the changes of the means; see `CohortUpdate`."""
        changes = [self._buffer(param) for param in self.params]
        self._run({"lr": lr, "betas": (self._arguments["betas"][0], weight_of_old)}, changes)
        return changes

    def average_(self, weight_of_old: float) -> None:
        """Update the curvature alone; see `CohortUpdate`."""
        if not self.elapsed:
            return
        curvatures = [state["curvature"] for state in self.states]
        if self._only_averages:
            torch._foreach_lerp_(curvatures, list(self._measured), 1 - weight_of_old)
        elif self._curvature_update is None:
            self.propose_(
                self._arguments["lr"], weight_of_old
            )  # the full update; the changes of the means are discarded
        else:
            accepted = _argument_names(self._curvature_update)
            for block in blocks(curvatures):
                arguments = {name: value for name, value in self._arguments_at(block).items() if name in accepted}
                old, measured = block.join(curvatures), block.join(self._measured)
                new = self._curvature_update(old, measured, rate=1 - weight_of_old, **arguments)
                block.write_(curvatures, new)

    def _arguments_at(self, block: Block) -> Mapping[str, Any]:
        """The keyword arguments for a block, with δ̃ of each weight if every weight has its own prior."""
        return self._arguments_of(block.join(self._precisions)) if self._precisions else self._arguments

    def _run(self, replaced: Mapping[str, Any], changes: list[Tensor] | None = None) -> None:
        """Run the update block by block with some arguments `replaced`; write `changes`, if given, instead of the means."""
        grads = [local(param.grad).contiguous() for param in self._owners if param.grad is not None]
        fields = {name: [state[name] for state in self.states] for name in self._state_type._fields[1:]}
        for block in blocks(self.params):
            mean = block.join(self.params)
            # Updates assume a prior centred at zero, so they get the distance from its mean.
            centre = block.join(self.prior_means) if self.prior_means else None
            start = mean if centre is None else mean - centre
            old = self._state_type(start, *(block.join(field) for field in fields.values()))
            new = self._update(
                old, block.join(grads), block.join(self._measured), **{**self._arguments_at(block), **replaced}
            )
            if changes is None:
                block.write_(self.params, new.mean if centre is None else new.mean + centre)
            else:
                block.write_(changes, new.mean - old.mean)
            for name, field in fields.items():
                block.write_(field, getattr(new, name))
