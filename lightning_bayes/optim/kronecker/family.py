"""The Kronecker family: matrix Gaussians for linear layers and convolutions, independent weights for everything else.

Passes measure the factors every T_stats updates. Each layer's factors are inverted every T_inv updates, and the layers take
turns (`optim.kronecker.intervals`).

The matrices move by the step of the paper (`equations.update`), by the bounded step of `optim.steps.trust_region`, or
by the step of the user's optimizer (`optim.steps.base_optimizer`). With the latter, K-FAC only shapes the posterior.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.optim.diagonal.cohort_update import DiagonalUpdate
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker import equations, layer_state
from lightning_bayes.optim.kronecker.arguments import KroneckerHyperparameters
from lightning_bayes.optim.kronecker.curvature import KroneckerCurvature, factor_shapes
from lightning_bayes.optim.kronecker.distributed_inversion import WorkerGroup
from lightning_bayes.optim.kronecker.intervals import is_due
from lightning_bayes.optim.kronecker.kl_clip import clipped_lr
from lightning_bayes.optim.kronecker.layer_noise import KroneckerNoise
from lightning_bayes.optim.kronecker.layers import KroneckerLayers
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.kronecker.moves import Move
from lightning_bayes.optim.readout.layer import store_size
from lightning_bayes.optim.runtime.family import PosteriorFamily
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.passes import Measurement
from lightning_bayes.optim.steps import CohortUpdate
from lightning_bayes.optim.weight_prior import prior_means

if TYPE_CHECKING:
    from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer


@final
class KroneckerFamily(PosteriorFamily):
    """Layers with Kronecker factors, and the diagonal family for all other parameters.

    Args:
        optimizer: The optimizer.
        settings: The arguments of K-FAC.

    Attributes:
        layers: The layers with factors.
        stats_interval: T_stats.
        inverse_interval: T_inv.
        workers: Processes that share the inversions; None inverts all layers in this process.
    """

    counters: ClassVar[Mapping[str, int]] = {"measurements": 0}

    def __init__(self, optimizer: MeanFieldOptimizer, settings: KroneckerHyperparameters) -> None:
        self._optimizer = optimizer
        self.stats_interval, self.inverse_interval = settings.stats_interval, settings.inverse_interval
        self.workers: WorkerGroup | None = None
        self.layers = KroneckerLayers(optimizer, settings)
        self._diagonal = DiagonalFamily(optimizer, self.layers.params)
        self._curvature = KroneckerCurvature(optimizer)
        self._noise = KroneckerNoise(optimizer)

    def state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the tensors in a parameter's state; see `PosteriorFamily`."""
        fields: Sequence[str] = self._optimizer.state_type._fields[1:]
        return fields if self._optimizer.steps[group["step_rule"]].uses_natural_update else ("curvature",)

    def check_groups(self) -> None:
        """Require that all layers are supported and that their factors fit into memory; see `KroneckerLayers.check`."""
        self.layers.check()

    # -- passes -------------------------------------------------------------------------------------------------------

    def capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """The engine's capture of the factors; see `PosteriorFamily`."""
        return self.layers.engine.capture(self.layers.request(self._optimizer.label_seed(sample), loss_scale))

    def measured_shapes(self, *, always: bool = False) -> dict[Hashable, Tensor]:
        """Both factors of every layer, and all other parameters; see `PosteriorFamily`."""
        # Due every T_stats updates, and until every parameter is measured.
        if not (always or is_due(self._optimizer.num_updates + 1, self.stats_interval) or self._has_new()):
            return {}
        in_matrices = self.layers.params()
        shapes: dict[Hashable, Tensor] = {p: p for _, p in self._optimizer.trained() if p not in in_matrices}
        for layer in self.layers.with_factors():
            shapes |= factor_shapes(layer)
        return shapes

    def _has_new(self) -> bool:
        """Whether a parameter is not measured yet, or not since its layer's matrix changed its shape."""
        states = self._optimizer.state
        layers = self.layers.with_factors()
        return any(states[param]["measurements"] == 0 for _, param in self._optimizer.trained()) or any(
            layer_state.is_of_another_shape(states[layer.weight], layer) for layer in layers
        )

    def sample(self, noise: CounterNoise, *, measures_curvature: bool | None) -> dict[nn.Parameter, Tensor]:
        """Draw a sample; see `PosteriorFamily`."""
        layers = self._adapted_layers()
        self._curvature.start(layers)
        sample = self._diagonal.sample(noise, measures_curvature=measures_curvature)
        return {**sample, **self._noise.sample(layers, noise, self._diagonal.scratch)}

    def scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the independent weights; see `PosteriorFamily`."""
        return self._diagonal.scores(params)

    def start_curvature(self) -> None:
        """Initialise factors and squared gradients before the first update; see `PosteriorFamily`."""
        layers = self._adapted_layers()
        self._diagonal.start_curvature()
        self._curvature.start(layers)

    def effective_parameters(self) -> Iterator[Tensor]:
        """The effective number of parameters of each tensor and matrix; see `PosteriorFamily`."""
        layers = self._adapted_layers()
        yield from self._diagonal.effective_parameters()
        yield from self._noise.effective_parameters(layers)

    def _adapted_layers(self) -> list[MatrixLayer]:
        """Adapt the state to the current layers, because freezing or unfreezing a bias changes its layer's matrix."""
        layers = self.layers.with_factors()
        for layer in layers:
            layer_state.drop_if_of_another_shape(self._optimizer.state[layer.weight], layer)
        in_matrices = self.layers.params()
        for _, param in self._optimizer.trained():
            state = self._optimizer.state[param]
            if param not in in_matrices and "curvature" not in state:
                state["curvature"] = torch.zeros_like(param)
        return layers

    # -- the update ---------------------------------------------------------------------------------------------------

    def updates(self, measurement: Measurement) -> Sequence[CohortUpdate]:
        """Update factors and inverses, and prepare the update of all parameters; see `PosteriorFamily`."""
        layers = self.layers.with_factors()
        self._curvature.refresh(layers, measurement, self.inverse_interval, self.workers)
        squares = list(self._diagonal.updates(measurement))
        if self._optimizer.base_step is None:
            moves = [move for layer in layers for move in self._layer_moves(layer)]
            return self._clipped([*moves, *map(self._diagonal_move, squares)])
        # The measurement only shapes the posterior.
        return [*(Move(layer.params, self._count_update(layer.params), layer.group) for layer in layers), *squares]

    def store_shapes(self) -> None:
        """Store the shape of the independent weights' noise and the size of every matrix; see `PosteriorFamily`."""
        self._diagonal.store_shapes()
        for layer in self.layers.with_factors():
            if layer.group["relative_noise"]:
                store_size(self._optimizer.state[layer.weight], layer.weight)

    def _count_update(self, params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """Count this update in the states of parameters, and return the states."""
        states = [self._optimizer.state[param] for param in params]
        for state in states:
            state["step"] += 1
        return states

    def _layer_moves(self, layer: MatrixLayer) -> list[Move]:
        """Update the momentum of a layer, and compute a move for each of its parameters."""
        states = self._count_update(layer.params)
        distance = layer.matrix(layer.params).detach()  # from the prior's mean
        if centres := prior_means(states):
            distance = distance - layer.matrix(centres)
        momentum = layer.matrix([state["momentum"] for state in states])
        step = equations.update(
            equations.KFACState(distance, momentum, layer_state.product(states[0], "inverse")),
            layer.matrix([param.grad for param in layer.params if param.grad is not None]),
            beta=layer.group["betas"][0],
            prior=effective(layer.group).prior,
            step=states[0]["step"],
        )
        for state, part in zip(states, layer.tensors(step.momentum), strict=True):
            state["momentum"] = part
        directions, norms = layer.tensors(step.direction), layer.tensors(step.direction * step.corrected)
        return [
            Move([param], [state], group, [direction.neg()], norm.sum())
            for param, state, group, direction, norm in zip(
                layer.params, states, layer.groups, directions, norms, strict=True
            )
        ]

    def _diagonal_move(self, update: DiagonalUpdate) -> Move:
        """Update curvature and momentum of a cohort without factors, and compute its move."""
        group, hyper = update.group, effective(update.group)
        steps = update.propose_(1.0)
        norms = [
            (step.square() * (state["curvature"] + hyper.prior + hyper.damping)).sum()
            for step, state in zip(steps, update.states, strict=True)
        ]
        return Move(update.params, update.states, group, steps, torch.stack(norms).sum())

    def _clipped(self, moves: list[Move]) -> list[Move]:
        """The moves, with one factor of at most 1 that keeps the Fisher norm of the whole step at or below the bound."""
        bound = self._optimizer.param_groups[0]["kl_clip"]
        if bound is None:
            return moves
        rates = [self._optimizer.steps[move.group["step_rule"]].rate(float(move.group["lr"])) for move in moves]
        norms = [move.norm * rate**2 for move, rate in zip(moves, rates, strict=True) if move.norm is not None]
        factor = float(clipped_lr(1.0, torch.stack([norm.to(norms[0].device) for norm in norms]).sum(), bound))
        for move in moves:
            move.clip_factor = factor
        return moves
