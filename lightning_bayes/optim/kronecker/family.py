"""The Kronecker family: matrix Gaussians for linear layers and convolutions, independent weights for everything else.

Passes measure the factors every T_stats updates. Each layer's factors are inverted every T_inv updates, and the layers take
turns (`optim.kronecker.curvature`).

The matrices move by the step of the paper (`equations.update`), by the bounded step of `optim.steps`, or
by the step of the user's optimizer (`optim.base_optimizer`). With the latter, K-FAC only shapes the posterior.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature import Capture
from lightning_bayes.optim.diagonal.family import DiagonalFamily, DiagonalUpdate
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker.curvature import factor_shapes, is_due, refresh
from lightning_bayes.optim.kronecker.layer import KroneckerLayer
from lightning_bayes.optim.kronecker.layers import KroneckerLayers
from lightning_bayes.optim.kronecker.moves import Move, clipped_lr
from lightning_bayes.optim.measuring import SHAPE_INTERVAL
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.passes import UpdateMeasurement
from lightning_bayes.optim.posterior_family import PosteriorFamily
from lightning_bayes.optim.steps import CohortUpdate

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@final
class KroneckerFamily(PosteriorFamily):
    """Layers with Kronecker factors, and the diagonal family for all other parameters."""

    counters: ClassVar[Mapping[str, int]] = {"measurements": 0}

    def __init__(self, optimizer: VariationalOptimizer) -> None:
        self._optimizer = optimizer
        self.stats_interval: int = optimizer.arguments["stats_interval"]
        self.inverse_interval: int = optimizer.arguments["inverse_interval"]
        self.layers = KroneckerLayers(optimizer)
        self._diagonal = DiagonalFamily(optimizer, self.layers.params)

    def state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the tensors in a parameter's state."""
        fields: Sequence[str] = self._optimizer.state_type._fields[1:]
        return fields if self._optimizer.steps[group["posterior"]["step_rule"]].uses_natural_update else ("curvature",)

    def check_groups(self) -> None:
        """Require that all layers are supported and that their factors fit into memory."""
        self.layers.check()

    # -- passes -------------------------------------------------------------------------------------------------------

    def capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """The engine's capture of the factors."""
        return self.layers.engine.capture(self.layers.request(self._optimizer.label_seed(sample), loss_scale))

    def to_measure(self, *, always: bool = False) -> dict[Hashable, Tensor]:
        """Both factors of every layer, and all other parameters."""
        # Due every T_stats updates, and until every parameter is measured.
        if not (always or is_due(self._optimizer.num_updates + 1, self.stats_interval) or self._has_new()):
            return {}
        in_matrices = self.layers.params()
        shapes: dict[Hashable, Tensor] = {p: p for _, p in self._optimizer.trained() if p not in in_matrices}
        for layer in self.layers.with_factors():
            shapes |= factor_shapes(layer.matrix)
        return shapes

    def _has_new(self) -> bool:
        """Whether a parameter is not measured yet, or not since its layer's matrix changed its shape."""
        states, layers = self._optimizer.state, self.layers.with_factors()
        is_new = any(states[param]["measurements"] == 0 for _, param in self._optimizer.trained())
        return is_new or any(layer.is_of_another_shape for layer in layers)

    @override
    def sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        layers = self._started_layers()
        sample = self._diagonal.sample(noise)
        for layer in layers:
            sample |= layer.sample(noise)
        return sample

    def scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the independent weights."""
        return self._diagonal.scores(params)

    def start_curvature(self) -> None:
        """Initialise factors and squared gradients before the first update."""
        self._started_layers()
        self._diagonal.start_curvature()

    def _started_layers(self) -> list[KroneckerLayer]:
        """The current layers, with state of the right shape, and with factors if they have an ``init_precision``."""
        layers, in_matrices = self.layers.with_factors(), self.layers.params()
        for layer in layers:
            layer.drop_if_of_another_shape()  # freezing or unfreezing a bias changes the matrix
        for _, param in self._optimizer.trained():
            state = self._optimizer.state[param]
            if param not in in_matrices and "curvature" not in state:
                state["curvature"] = torch.zeros_like(param)
        for layer in layers:
            layer.start()
        return layers

    def refresh(self, *, measured: bool, always: bool = False) -> None:
        """Store the covariance of independent weights, and the scale of each layer now and then."""
        self._diagonal.refresh(measured=measured, always=always)
        updates = self._optimizer.num_updates
        if always or updates <= SHAPE_INTERVAL or updates % SHAPE_INTERVAL == 0:
            for layer in self.layers.with_factors():
                layer.refresh()

    # -- the update ---------------------------------------------------------------------------------------------------

    def updates(self, measurement: UpdateMeasurement) -> Sequence[CohortUpdate]:
        """Update factors and inverses, and prepare the update of all parameters."""
        layers = self.layers.with_factors()
        update = self._optimizer.num_updates + 1
        refresh(layers, measurement, update=update, interval=self.inverse_interval)
        squares = list(self._diagonal.updates(measurement))
        if self._optimizer.base_step is None:
            moves = [move for layer in layers for move in layer.moves()]
            moves = self._clipped([*moves, *map(_diagonal_move, squares)])
        else:  # the measurement only shapes the posterior
            matrices = ((layer.matrix, layer.count_update()) for layer in layers)
            moves = [Move(matrix.params, states, matrix.group) for matrix, states in matrices]
        moves = [replace(move, summed=measurement.summed) for move in moves]
        return moves if self._optimizer.base_step is None else [*moves, *squares]

    def _clipped(self, moves: list[Move]) -> list[Move]:
        """The moves, with one factor of at most 1 that keeps the Fisher norm of the whole step at or below the bound."""
        bound = self._optimizer.param_groups[0]["posterior"]["kl_clip"]
        if bound is None:
            return moves
        rates = [
            self._optimizer.steps[move.group["posterior"]["step_rule"]].rate(float(move.group["lr"])) for move in moves
        ]
        norms = [move.norm * rate**2 for move, rate in zip(moves, rates, strict=True) if move.norm is not None]
        factor = float(clipped_lr(1.0, torch.stack([norm.to(norms[0].device) for norm in norms]).sum(), bound))
        return [replace(move, clip_factor=factor) for move in moves]


def _diagonal_move(update: DiagonalUpdate) -> Move:
    """Update curvature and momentum of a cohort without factors, and compute its move."""
    group, hyper = update.group, effective(update.group)
    steps = update.propose_(1.0)
    norms = [
        (step.square() * (state["curvature"] + hyper.prior + hyper.damping)).sum()
        for step, state in zip(steps, update.states, strict=True)
    ]
    return Move(update.params, update.states, group, steps, torch.stack(norms).sum())
