"""The elementwise update of a mean-field method, applied to many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.sharding import local
from lightning_bayes.optim.runtime.blocks import Block, blocks
from lightning_bayes.optim.runtime.shards import local_parts
from lightning_bayes.optim.steps import CohortUpdate
from lightning_bayes.optim.weight_prior import prior_means

if TYPE_CHECKING:
    from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer


@cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


@final
class DiagonalUpdate(CohortUpdate):
    """Applies the pure, elementwise update of a method to a cohort.

    Args:
        optimizer: The optimizer, whose `natural_update` is applied.
        params: The cohort. The states of its parameters count this update already.
        group: Their parameter group.
        measured: ĥ of each parameter; s if nothing was measured.
        buffer: Returns scratch memory for the change of a parameter.
        elapsed: e, as in `CohortUpdate`.
    """

    def __init__(
        self,
        optimizer: MeanFieldOptimizer,
        params: Sequence[nn.Parameter],
        group: dict[str, Any],
        measured: Sequence[Tensor],
        buffer: Callable[[nn.Parameter], Tensor],
        elapsed: int = 1,
    ) -> None:
        states = [optimizer.state[param] for param in params]
        self.params, self.states = local_parts(params, states)
        self.group, self.index, self.elapsed = group, states[0]["step"], elapsed
        self.measurements = self.index
        self.prior_means = prior_means(self.states)
        # δ of each weight; empty if the group's δ applies
        self._precisions = [state["prior_precision"] for state in self.states if "prior_precision" in state]
        self._optimizer, self._owners, self._measured, self._buffer = optimizer, params, measured, buffer
        self._arguments = optimizer.update_arguments(group, self.index)
        self.prior = self._arguments["prior"]

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
        curvature_update = self._optimizer.curvature_update
        if self._optimizer.averages_curvature:
            torch._foreach_lerp_(curvatures, list(self._measured), 1 - weight_of_old)
        elif curvature_update is None:  # the full update, whose changes of the means are discarded
            self.propose_(self._arguments["lr"], weight_of_old)
        else:
            accepted = _argument_names(curvature_update)
            for block in blocks(curvatures):
                arguments = {name: value for name, value in self._arguments_at(block).items() if name in accepted}
                old, measured = block.join(curvatures), block.join(self._measured)
                new = curvature_update(old, measured, rate=1 - weight_of_old, **arguments)
                block.write_(curvatures, new)

    def _arguments_of(self, precision: Tensor) -> Mapping[str, Any]:
        """The keyword arguments of the update with δ of each weight."""
        return self._optimizer.update_arguments(self.group, self.index, precision)

    def _arguments_at(self, block: Block) -> Mapping[str, Any]:
        """The keyword arguments for a block, with δ̃ of each weight if every weight has its own prior."""
        return self._arguments_of(block.join(self._precisions)) if self._precisions else self._arguments

    def _run(self, replaced: Mapping[str, Any], changes: list[Tensor] | None = None) -> None:
        """Run the update block by block with some arguments `replaced`; write `changes`, if given, instead of the means."""
        grads = [local(param.grad).contiguous() for param in self._owners if param.grad is not None]
        update, state_type = self._optimizer.natural_update, self._optimizer.state_type
        fields = {name: [state[name] for state in self.states] for name in state_type._fields[1:]}
        for block in blocks(self.params):
            mean = block.join(self.params)
            # Updates assume a prior centred at zero, so they get the distance from its mean.
            centre = block.join(self.prior_means) if self.prior_means else None
            start = mean if centre is None else mean - centre
            old = state_type(start, *(block.join(field) for field in fields.values()))
            arguments = {**self._arguments_at(block), **replaced}
            new = update(old, block.join(grads), block.join(self._measured), **arguments)
            if changes is None:
                block.write_(self.params, new.mean if centre is None else new.mean + centre)
            else:
                block.write_(changes, new.mean - old.mean)
            for name, field in fields.items():
                block.write_(field, getattr(new, name))
