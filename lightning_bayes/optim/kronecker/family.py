"""The Kronecker family: matrix Gaussians for linear layers and convolutions, independent weights for everything else.

Passes measure the factors every T_stats updates. Each layer's factors are inverted every T_inv updates, and the layers take
turns.

The matrices move by the step of the paper (`equations.update`), by the bounded step of `optim.steps`, or
by the step of the user's optimizer (`optim.base_optimizer`). With the latter, K-FAC only shapes the posterior.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature import Capture
from lightning_bayes.curvature.factors import Request, has_factors
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.optim.diagonal.family import DiagonalFamily, DiagonalUpdate
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.finished_pass import UpdateMeasurement
from lightning_bayes.optim.fisher import label_source
from lightning_bayes.optim.kronecker.curvature import by_name, is_due, measured_factors
from lightning_bayes.optim.kronecker.layer import KroneckerLayer
from lightning_bayes.optim.kronecker.layers import description, require_room, require_supported
from lightning_bayes.optim.kronecker.matrix_layers import LayerPartition, partition_layers
from lightning_bayes.optim.kronecker.moves import Move, clipped_lr
from lightning_bayes.optim.measuring import SHAPE_INTERVAL
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.posterior_family import PosteriorFamily
from lightning_bayes.optim.steps import CohortUpdate

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer


@final
class KroneckerFamily(PosteriorFamily):
    """Layers with Kronecker factors, and the diagonal family for all other parameters."""

    counters: ClassVar[Mapping[str, int]] = {"measurements": 0}

    def __init__(self, optimizer: VariationalOptimizer) -> None:
        self._optimizer, self._settings = optimizer, optimizer.arguments
        self._is_measured_by_backpack = self._settings["engine"] == "backpack"
        family = weakref.proxy(self)  # a cycle would keep tensors until the garbage collector runs
        self._diagonal = DiagonalFamily(optimizer, lambda: family.partition().params)
        self._found: tuple[Any, LayerPartition, list[KroneckerLayer]] | None = None  # with its key

    @override
    def state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        fields: Sequence[str] = self._optimizer.state_type._fields[1:]
        return fields if self._optimizer.steps[group["posterior"]["step_rule"]].uses_natural_update else ("curvature",)

    # -- the layers ---------------------------------------------------------------------------------------------------

    def partition(self) -> LayerPartition:
        """The layers with and without factors. They change when parameters are frozen, unfrozen or added."""
        groups = self._optimizer.param_groups
        # The key contains ids, because loading a state creates new groups.
        key = [(id(group), [param.requires_grad for param in group["params"]]) for group in groups]
        if self._found is None or self._found[0] != key:
            uses_our_rules = self._settings["unsupported_layers"] == "fused"
            partition = partition_layers(
                self._optimizer.model,
                groups,
                deterministic=self._optimizer.deterministic,
                max_side=self._settings["max_side"],
                can_have_matrix=has_factors if uses_our_rules else self._engine.has_factors,
            )
            self._found = key, partition, [KroneckerLayer(layer, self._optimizer) for layer in partition.layers]
        return self._found[1]

    def _layers(self) -> list[KroneckerLayer]:
        """The current layers with factors."""
        self.partition()
        assert self._found is not None
        return self._found[2]

    @property
    def _engine(self) -> KroneckerEngine:
        assert isinstance(self._optimizer.engine, KroneckerEngine)
        return self._optimizer.engine

    @override
    def check_groups(self) -> None:
        partition = self.partition()
        if self._settings["unsupported_layers"] == "refuse" and self._is_measured_by_backpack:
            require_supported(partition, self._engine)
        stored = {"factors": True, "inverses": self._optimizer.base_step is None, "roots": self._optimizer.noisy}
        require_room(partition, [kind for kind, is_stored in stored.items() if is_stored], self._settings)

    def describe(self) -> str:
        """How each layer is measured, for a log."""
        name = self._optimizer.__class__.__name__  # type() would return the type of the weak reference
        return f"{name}: {description(self.partition(), self._likelihood(), self._settings)}"

    # -- passes -------------------------------------------------------------------------------------------------------

    @override
    def capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        layers = {layer.module: layer.has_bias for layer in self.partition().layers}
        labels = self._likelihood() if self._draws_labels() else None
        seed = self._optimizer.label_seed(sample)
        return self._engine.capture(Request(layers, labels, seed, loss_scale, loops=labels is None))

    def _likelihood(self) -> OutputLikelihood | None:
        """The likelihood to sample labels from; None uses the labels of the data."""
        return label_source(self._settings["fisher"], self._settings["likelihood"], self._optimizer.model)

    def _draws_labels(self) -> bool:
        """Whether this package's rules measure any parameter. BackPACK samples its own labels."""
        if not self._is_measured_by_backpack:
            return True
        layers = [layer for layer in self.partition().layers if self._engine.has_factors(layer.module)]
        by_backpack = {param for layer in layers for param in layer.params}
        return any(param not in by_backpack for _, param in self._optimizer.trained())

    @override
    def to_measure(self, *, always: bool = False) -> dict[Hashable, Tensor]:
        # Due every T_stats updates, and until every parameter is measured.
        states, update = self._optimizer.state, self._optimizer.num_updates + 1
        is_new = any(states[param]["measurements"] == 0 for _, param in self._optimizer.trained())
        is_new = is_new or any(layer.is_of_another_shape for layer in self._layers())
        if not (always or is_new or is_due(update, self._settings["stats_interval"])):
            return {}
        partition = self.partition()
        shapes: dict[Hashable, Tensor] = {p: p for _, p in self._optimizer.trained() if p not in partition.params}
        for layer in partition.layers:
            zero = layer.weight.detach().new_zeros(())  # expanded, it needs no memory
            shapes |= by_name(layer.weight, [zero.expand(shape) for shape in layer.factor_shapes])
        return shapes

    @override
    def sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        self._start_layers()
        sample = self._diagonal.sample(noise)
        for layer in self._layers():
            sample |= layer.sample(noise)
        return sample

    @override
    def scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        return self._diagonal.scores(params)

    @override
    def start_curvature(self) -> None:
        self._start_layers()
        self._diagonal.start_curvature()

    def _start_layers(self) -> None:
        """Give the layers, and the parameters that are no longer part of one, a state of the right shape."""
        in_matrices = self.partition().params
        for layer in self._layers():
            layer.start()
        for _, param in self._optimizer.trained():
            state = self._optimizer.state[param]
            if param not in in_matrices and "curvature" not in state:
                state["curvature"] = torch.zeros_like(param)

    @override
    def refresh(self, *, measured: bool, always: bool = False) -> None:
        self._diagonal.refresh(measured=measured, always=always)
        updates = self._optimizer.num_updates
        if always or updates <= SHAPE_INTERVAL or updates % SHAPE_INTERVAL == 0:
            for layer in self._layers():
                layer.refresh()

    # -- the update ---------------------------------------------------------------------------------------------------

    @override
    def updates(self, measurement: UpdateMeasurement) -> Sequence[CohortUpdate]:
        layers, summed = self._layers(), measurement.summed
        self._renew(layers, measurement.curvature)
        squares = list(self._diagonal.updates(measurement))
        if self._optimizer.base_step is not None:  # the measurement only shapes the posterior
            return [
                *(Move(layer.matrix.params, layer.count_update(), layer.matrix.group, summed) for layer in layers),
                *squares,
            ]
        return self._clipped(
            [*(move for layer in layers for move in layer.moves(summed)), *map(_diagonal_move, squares)]
        )

    def _renew(self, layers: Sequence[KroneckerLayer], curvature: Mapping[Hashable, Tensor]) -> None:
        """Average the factors with a measurement, and invert those that are due. If that fails, nothing changes."""
        update, interval, renewed = self._optimizer.num_updates + 1, self._settings["inverse_interval"], []
        for i, layer in enumerate(layers):
            measured = measured_factors(layer.matrix.weight, curvature) if curvature else None
            takes_turn = is_due(update, interval, offset=i * interval // len(layers))
            renewed.append(layer.renewed(measured, is_due=takes_turn))
        for layer, new in zip(layers, renewed, strict=True):
            layer.store(new)

    def _clipped(self, moves: list[Move]) -> list[Move]:
        """The moves, with one factor of at most 1 that keeps the Fisher norm of the whole step at or below the bound."""
        bound = self._optimizer.param_groups[0]["posterior"]["kl_clip"]
        if bound is None:
            return moves
        steps = self._optimizer.steps
        rates = [steps[move.group["posterior"]["step_rule"]].rate(float(move.group["lr"])) for move in moves]
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
    return Move(update.params, update.states, group, update.summed, steps, torch.stack(norms).sum())
