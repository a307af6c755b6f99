"""The elementwise update of a mean-field method, applied to many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.runtime.blocks import Block, blocks
from lightning_bayes.optim.runtime.measuring import weight_of_old
from lightning_bayes.optim.steps import CohortUpdate
from lightning_bayes.optim.weight_prior import prior_means

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


@final
class DiagonalUpdate(CohortUpdate):
    """Applies the pure, elementwise update of a method to a cohort.

    Args:
        optimizer: The optimizer, whose `natural_update` is applied.
        params: The cohort.
        states: The states of its parameters, which count this update already.
        group: Their parameter group.
        measured: ĥ of each parameter; s if nothing was measured.
        buffer: Returns scratch memory for the change of a parameter.
        elapsed: e, the number of updates since the previous measurement; 0 if this update measures nothing.
    """

    def __init__(
        self,
        optimizer: VariationalOptimizer,
        params: Sequence[nn.Parameter],
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
        measured: Sequence[Tensor],
        buffer: Callable[[nn.Parameter], Tensor],
        elapsed: int = 1,
    ) -> None:
        self.params, self.states = params, states
        self.group, self.index = group, states[0]["step"]
        # δ of each weight; empty if the group's δ applies
        self._precisions = [state["prior_precision"] for state in self.states if "prior_precision" in state]
        self._optimizer, self._owners, self._measured, self._buffer = optimizer, params, measured, buffer
        # Without a count, updates between two measurements count too; see `optim.runtime.measuring`.
        self._elapsed, self._measurements = elapsed, states[0].get("measurements", self.index)

    @cached_property
    def _weight_of_old(self) -> float:
        """The weight of the old curvature."""
        starts_as_mean = not self._optimizer.step_of(self.group).is_published
        beta = self.group["posterior"]["betas"][1]
        return weight_of_old(beta, self._measurements, self._elapsed, starts_as_mean=starts_as_mean)

    @cached_property
    def _arguments(self) -> Mapping[str, Any]:
        """The keyword arguments of the update with the group's δ."""
        return self._optimizer.update_arguments(self.group, self.index)

    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃, for each weight if every weight has its own prior; see `CohortUpdate`."""
        if self._precisions:
            return [self._arguments_of(precision)["prior"] for precision in self._precisions]
        hyper = effective(self.group)
        if self.group["posterior"]["decay"] == "prior" and hyper.penalty:
            return hyper.penalty
        return float(self._arguments["prior"]) if hyper.stated_prior else 0.0

    def move_(self) -> None:
        """Apply the algorithm's update; see `CohortUpdate`."""
        self._run({})

    def propose_(self, lr: float) -> list[Tensor]:
        """Update the state and return the changes of the means; see `CohortUpdate`."""
        changes = [self._buffer(param) for param in self.params]
        self._run({"lr": lr}, changes)
        return changes

    def average_(self) -> None:
        """Update the curvature alone; see `CohortUpdate`."""
        if not self._elapsed:
            return
        curvatures = [state["curvature"] for state in self.states]
        curvature_update = self._optimizer.curvature_update
        if self._optimizer.averages_curvature:
            torch._foreach_lerp_(curvatures, list(self._measured), 1 - self._weight_of_old)
        elif curvature_update is None:  # the full update, whose changes of the means are discarded
            self.propose_(self._arguments["lr"])
        else:
            accepted = _argument_names(curvature_update)
            for block in blocks(curvatures):
                arguments = {name: value for name, value in self._arguments_at(block).items() if name in accepted}
                old, measured = block.join(curvatures), block.join(self._measured)
                new = curvature_update(old, measured, rate=1 - self._weight_of_old, **arguments)
                block.write_(curvatures, new)

    def _arguments_of(self, precision: Tensor) -> Mapping[str, Any]:
        """The keyword arguments of the update with δ of each weight."""
        return self._optimizer.update_arguments(self.group, self.index, precision)

    def _arguments_at(self, block: Block) -> Mapping[str, Any]:
        """The keyword arguments for a block, with δ̃ of each weight if every weight has its own prior."""
        return self._arguments_of(block.join(self._precisions)) if self._precisions else self._arguments

    def _run(self, replaced: Mapping[str, Any], changes: list[Tensor] | None = None) -> None:
        """Run the update block by block with some arguments `replaced`; write `changes`, if given, instead of the means."""
        betas = self._arguments["betas"][0], self._weight_of_old
        centres = prior_means(self.states)
        grads = [param.grad.contiguous() for param in self._owners if param.grad is not None]
        update, state_type = self._optimizer.natural_update, self._optimizer.state_type
        fields = {name: [state[name] for state in self.states] for name in state_type._fields[1:]}
        for block in blocks(self.params):
            mean = block.join(self.params)
            # Updates assume a prior centred at zero, so they get the distance from its mean.
            centre = block.join(centres) if centres else None
            start = mean if centre is None else mean - centre
            old = state_type(start, *(block.join(field) for field in fields.values()))
            arguments = {**self._arguments_at(block), "betas": betas, **replaced}
            new = update(old, block.join(grads), block.join(self._measured), **arguments)
            if changes is None:
                block.write_(self.params, new.mean if centre is None else new.mean + centre)
            else:
                block.write_(changes, new.mean - old.mean)
            for name, field in fields.items():
                block.write_(field, getattr(new, name))
