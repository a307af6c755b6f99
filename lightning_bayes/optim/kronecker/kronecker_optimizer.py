"""Base class of K-FAC and Noisy K-FAC: Kronecker factors for linear layers and convolutions, VOGN for everything else.

Passes measure the factors every T_stats updates. Each layer's factors are inverted every T_inv updates, and the layers take
turns (`optim.kronecker.intervals`).

The matrices move by the step of the paper (`layer_update`), by the bounded step of `optim.steps.trust_region`, or by the
step of the user's optimizer (`optim.steps.base_optimizer`). With the latter, K-FAC only shapes the posterior.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Capture, Likelihood
from lightning_bayes.curvature.factors import Request, has_factors
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.diagonal.cohort import prior_means
from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.hyperparameters import Hyperparameters, MeanFieldArguments
from lightning_bayes.optim.kronecker import layer_state
from lightning_bayes.optim.kronecker.arguments import DEFAULT_MAX_SIDE, KroneckerHyperparameters
from lightning_bayes.optim.kronecker.distributed_inversion import WorkerGroup, invert_all
from lightning_bayes.optim.kronecker.estimator import KroneckerFactorsEstimator, factor_shapes, factors_of
from lightning_bayes.optim.kronecker.factor_source import UnsupportedLayers, check_factors, layer_rule, require_factors
from lightning_bayes.optim.kronecker.intervals import check_intervals, is_due, layers_due
from lightning_bayes.optim.kronecker.kl_clip import clipped_lr
from lightning_bayes.optim.kronecker.matrix_layers import Division, MatrixLayer, divide
from lightning_bayes.optim.kronecker.moves import Move
from lightning_bayes.optim.runtime.passes import Curvature, Measurement, zeros_where_missing
from lightning_bayes.optim.schedules import Schedule
from lightning_bayes.optim.steps import BaseOptimizerStep
from lightning_bayes.optim.weight_prior import refuse_weight_prior
from lightning_bayes.posteriors import require_memory


class KroneckerOptimizer(MeanFieldOptimizer, ABC):
    """A mean-field optimizer with Kronecker factors for linear layers and convolutions; see the module docstring.

    Class attributes:
        layer_state_type: The state that a layer's step needs.
        layer_update: The pure update of one layer.
        average_factors: The pure running average of a layer's factors.

    Args:
        model: See `MeanFieldOptimizer`.
        params: See `MeanFieldOptimizer`.
        stats_interval: T_stats, updates between measurements of the curvature.
        inverse_interval: T_inv, updates between inversions of a layer's factors.
        max_side: Layers whose matrix has a longer side use mean-field updates.
        limit_mib: Limit in MiB on the memory of factors, inverses and roots.
        fisher: ``"sampled"`` samples labels from the model's likelihood (the Fisher); ``"empirical"`` uses the data's.
            None samples if the likelihood is known. With ``engine="backpack"`` it applies to the other layers only.
        likelihood: The likelihood of the outputs. None looks for a `Likelihood` in the model's attribute ``likelihood``.
        kl_clip: c, the bound on the squared Fisher norm of the whole step; see `optim.kronecker.kl_clip`. None: no bound.
            Zhang et al. use ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        factors: ``"kfac"`` with either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``, which reads the
            likelihood from the loss. See `optim.kronecker.factor_source`.
        unsupported_layers: How to treat layers for which ``engine="backpack"`` has no factors: ``"refuse"``,
            ``"mean_field"``, or ``"fused"`` to use this package's rules.
        **fields: See `MeanFieldOptimizer`.

    Raises:
        HyperparameterError: If a value is out of range.
    """

    averages_curvature = True
    can_graft = False
    estimator = KroneckerFactorsEstimator()
    hyperparameters: ClassVar[type[Hyperparameters]] = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ is per measurement, not per update
    layer_state_type: ClassVar[Callable[..., Any]]
    layer_update: ClassVar[Callable[..., Any]]
    average_factors: ClassVar[Callable[..., KroneckerProduct]]

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        stats_interval: int = 10,
        inverse_interval: int = 100,
        max_side: int = DEFAULT_MAX_SIDE,
        limit_mib: float = 4096.0,
        fisher: FisherName | None = None,
        likelihood: Likelihood | None = None,
        kl_clip: float | Schedule | None = None,
        factors: KroneckerQuantity = "kfac",
        unsupported_layers: UnsupportedLayers = "refuse",
        **fields: Unpack[MeanFieldArguments],
    ) -> None:
        check_intervals(stats_interval, inverse_interval)
        check_fisher(fisher)
        refuse_weight_prior(type(self).__name__, fields.get("prior"))
        check_factors(fields.get("engine", "fused"), factors, unsupported_layers)
        self._cached_division: tuple[Any, Division] | None = None  # with its key
        self._workers: WorkerGroup | None = None
        self.stats_interval, self.inverse_interval = stats_interval, inverse_interval
        self.max_side, self.limit_mib, self.fisher, self._likelihood = max_side, limit_mib, fisher, likelihood
        self.factors, self.unsupported_layers = factors, unsupported_layers
        self.estimator = KroneckerFactorsEstimator(factors)  # type: ignore[misc]
        super().__init__(model, params, own={"kl_clip": kl_clip, "max_side": max_side}, **fields)
        label_source(fisher, likelihood, model)  # raises if the likelihood cannot be sampled

    @abstractmethod
    def _inverted(
        self, kind: str, layer: MatrixLayer, curvature: KroneckerProduct, hyperparameters: Effective
    ) -> KroneckerProduct:
        """Invert a layer's curvature; `kind` is one of `_kinds`."""

    def _kinds(self, layer: MatrixLayer) -> list[str]:
        """The products that inverting the layer yields: ``"inverse"`` for the step, ``"root"`` for the noise."""
        return ["inverse"] if self.base_step is None else []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `MeanFieldOptimizer.add_param_group`. Raises if the factors exceed the memory limit."""
        super().add_param_group(param_group)
        if self.unsupported_layers == "refuse" and self._factor_engine.has_factors is not has_factors:
            require_factors(self.model, self.division(), self._factor_engine)
        layers = self.division().layers
        sizes = [groups * (rows**2 + columns**2) for groups, rows, columns in (layer.shape for layer in layers)]
        if layers:
            stored = {"factors": True, "inverses": self.base_step is None, "roots": self.noisy}
            kinds = [kind for kind, is_stored in stored.items() if is_stored]
            require_memory(
                f"The Kronecker {', '.join(kinds)} of {len(layers)} layers",
                len(kinds) * sum(sizes),
                layers[0].weight.element_size(),
                self.limit_mib,
                f"a smaller max_side than {self.max_side}",
            )

    def division(self) -> Division:
        """The current layers with Kronecker factors."""
        # The key contains ids, because loading a state creates new groups.
        key = [(id(group), [param.requires_grad for param in group["params"]]) for group in self.param_groups]
        if self._cached_division is None or self._cached_division[0] != key:
            is_matrix = layer_rule(self._factor_engine, self.unsupported_layers)
            division = divide(self.model, self.param_groups, self._have_same_noise, self.max_side, is_matrix)
            self._cached_division = key, division
        return self._cached_division[1]

    def _have_same_noise(self, weight: nn.Parameter, bias: nn.Parameter) -> bool:
        return (weight in self._deterministic) == (bias in self._deterministic)

    def summary(self) -> str:
        """Describe the curvature of every layer, for a log."""
        division, labels = self.division(), self._describe_labels()
        long = [f"{name} (side {side} > max_side={self.max_side})" for name, side in division.too_long.items()]
        others = ", ".join([*long, *division.others]) or "none"
        return (
            f"{type(self).__name__}: Kronecker factors for {len(division.layers)} layers, labels {labels}, measured every "
            f"{self.stats_interval} and inverted every {self.inverse_interval} updates; mean-field: {others}."
        )

    def _describe_labels(self) -> str:
        if self._factor_engine.has_factors is not has_factors:
            drawn = "drawn from the loss's likelihood" if self.factors == "kfac" else "none"
            return f"{drawn} ({self.factors} by BackPACK)"
        likelihood = label_source(self.fisher, self._likelihood, self.model)
        if likelihood is None:
            return "from the data (empirical Fisher)"
        return f"drawn from {type(likelihood).__name__} (Fisher)"

    # -- passes -------------------------------------------------------------------------------------------------------

    def _layers(self) -> list[MatrixLayer]:
        return self.division().layers

    def _forget_other_shapes(self) -> None:
        """Reset layers whose bias was frozen or unfrozen."""
        for layer in self._layers():
            layer_state.drop_if_of_another_shape(self.state[layer.weight], layer)

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """Cohorts of the parameters without Kronecker factors."""
        in_matrices = {param for layer in self._layers() for param in layer.params}
        cohorts = [[p for p in cohort if p not in in_matrices] for cohort in super()._cohorts(group)]
        for cohort in cohorts:
            for param in cohort:
                if "curvature" not in self.state[param]:  # previously part of a matrix
                    self.state[param]["curvature"] = torch.zeros_like(param)
        return [cohort for cohort in cohorts if cohort]

    def _state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._state(param, group)
        state.setdefault("measurements", 0)
        return state

    def _state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        uses_update = self.step_of(group).uses_update
        return self.state_type._fields[1:] if uses_update else ("curvature",)

    def _measures_now(self) -> bool:
        """Whether the passes of the open update measure curvature."""
        is_new = any(self._state(param, group)["measurements"] == 0 for group, param in self._trained())
        return self.measures_always or is_new or is_due(self.num_updates + 1, self.stats_interval)

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        self._forget_other_shapes()
        if not self._measures_now():
            return self._unmeasured_capture()
        layers = {layer.module: layer.has_bias for layer in self._layers()}
        labels = label_source(self.fisher, self._likelihood, self.model) if self._draws_labels() else None
        return self._factor_engine.capture(Request(layers, labels, self._label_seed(sample), loss_scale))

    @property
    def _factor_engine(self) -> KroneckerEngine:
        assert isinstance(self.engine, KroneckerEngine)
        return self.engine

    def _draws_labels(self) -> bool:
        """Whether this package's rules measure any parameter. BackPACK samples its own labels."""
        has_engine_factors = self._factor_engine.has_factors
        if has_engine_factors is has_factors:
            return True
        by_backpack = {param for layer in self._layers() if has_engine_factors(layer.module) for param in layer.params}
        return any(param not in by_backpack for _, param in self._trained())

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        if not self._measures_now():
            return {}
        layers = self._layers()
        in_matrices = {param for layer in layers for param in layer.params}
        shapes: dict[Hashable, Tensor] = {param: param for _, param in self._trained() if param not in in_matrices}
        for layer in layers:
            shapes |= factor_shapes(layer)
        return zeros_where_missing(curvature, shapes)

    # -- curvature ----------------------------------------------------------------------------------------------------

    def share_inversions(self, workers: WorkerGroup | None) -> None:
        """Distribute the inversions over the processes that train together.

        Args:
            workers: The processes, including this one; None to invert all layers here.
        """
        self._workers = workers

    def _average_factors(self, layer: MatrixLayer, measurement: Measurement) -> None:
        state, measured = self.state[layer.weight], factors_of(layer, measurement.curvature)
        old = layer_state.product(state, "factor")
        beta = self._weight_of_old(state, layer.group)
        new = measured if old is None else type(self).average_factors(old, measured, beta=beta)
        layer_state.put(state, "factor", new)
        count = state["measurements"] + 1
        for param in layer.params:
            self.state[param]["measurements"] = count
        self._forget_single_curvatures(layer)

    def _invert_layer(self, layer: MatrixLayer) -> None:
        state, hyperparameters = self.state[layer.weight], effective(layer.group)
        curvature = layer_state.product(state, "factor")
        assert curvature is not None
        for kind in self._kinds(layer):
            layer_state.put(state, kind, self._inverted(kind, layer, curvature, hyperparameters))

    def _forget_single_curvatures(self, layer: MatrixLayer) -> None:
        for param in layer.params:
            self.state[param].pop("curvature", None)

    def _weight_of_old(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        beta: float = group["betas"][1]
        return self.step_of(group).weight_of_old(beta, state["measurements"] + 1)

    # -- the update ---------------------------------------------------------------------------------------------------

    def _update_all(self, measurement: Measurement) -> None:
        for group in self.param_groups:
            effective(group)  # raises if N is unknown
        layers = self._layers()
        with layer_state.restored_on_error(self.state[param] for layer in layers for param in layer.params):
            self._refresh(layers, measurement)
        if self.base_step is None:
            self._step(layers, measurement)
        else:
            self._step_with(self.base_step, layers, measurement)
        self._finish_update(measurement)

    def _refresh(self, layers: list[MatrixLayer], measurement: Measurement) -> None:
        """Update the factors from the measurement, and invert those that are due."""
        measures = bool(measurement.curvature)
        if measures:
            for layer in layers:
                self._average_factors(layer, measurement)
        counts = [self.state[layer.weight]["measurements"] for layer in layers]
        due = [layers[i] for i in layers_due(counts, self.num_updates + 1, self.inverse_interval, measures=measures)]
        kinds = {layer: products for layer in due if (products := self._kinds(layer))}
        invert_all(kinds, self.state, self._invert_layer, self._workers)

    def _step(self, layers: list[MatrixLayer], measurement: Measurement) -> None:
        """The algorithm's own step."""
        moves = [move for layer in layers for move in self._layer_moves(layer)]
        for group in self.param_groups:
            moves += [self._diagonal_move(params, group, measurement) for params in self._cohorts(group)]
        clip_factor = self._clip_factor(moves)
        for move in moves:
            move.clip_factor = clip_factor
            self.step_of(move.group).apply(move)

    def _step_with(self, step: BaseOptimizerStep, layers: list[MatrixLayer], measurement: Measurement) -> None:
        """The step of the user's optimizer. The measurement only shapes the posterior."""
        cohorts = [(list(layer.params), layer.group) for layer in layers]
        for group in self.param_groups:
            for params in self._cohorts(group):
                cohorts.append((params, group))
                if measurement.curvature:
                    self._average_squares(params, group, measurement)
        for params, group in cohorts:
            states = [self.state[param] for param in params]
            for state in states:
                state["step"] += 1
            step.apply(Move(params, states, group))
        step.finish(self.param_groups, self.state)

    def _average_squares(self, params: list[nn.Parameter], group: dict[str, Any], measurement: Measurement) -> None:
        curvatures = [self.state[param]["curvature"] for param in params]
        measured = [measurement.curvature[param] for param in params]
        self._start_curvature(params, group)
        torch._foreach_lerp_(curvatures, measured, 1 - self._weight_of_old(self.state[params[0]], group))
        for param in params:
            self.state[param]["measurements"] += 1

    def _layer_moves(self, layer: MatrixLayer) -> Iterator[Move]:
        states = [self.state[param] for param in layer.params]
        centred, centres = layer.matrix(layer.params).detach(), prior_means(states)
        if centres:
            centred = centred - layer.matrix(centres)
        for state in states:
            state["step"] += 1
        number = states[0]["step"]
        momentum = layer.matrix([state["momentum"] for state in states])
        step = type(self).layer_update(
            type(self).layer_state_type(centred, momentum, layer_state.product(states[0], "inverse")),
            layer.matrix([param.grad for param in layer.params if param.grad is not None]),
            beta=layer.group["betas"][0],
            prior=effective(layer.group).prior,
            step=number,
        )
        norms = layer.tensors(step.direction * step.corrected)
        for state, momentum in zip(states, layer.tensors(step.momentum), strict=True):
            state["momentum"] = momentum
        for param, group, part, norm in zip(
            layer.params, layer.groups, layer.tensors(step.direction), norms, strict=True
        ):
            yield Move([param], [self.state[param]], group, [part.neg()], norm.sum())

    def _diagonal_move(self, params: list[nn.Parameter], group: dict[str, Any], measurement: Measurement) -> Move:
        measures = bool(measurement.curvature)
        states = [self.state[param] for param in params]
        curvatures = [state["curvature"] for state in states]
        has_curvature = self._start_curvature(params, group)
        measured = self._measured_curvature(params, group, measurement) if measures else curvatures
        if measures and not has_curvature:
            torch._foreach_copy_(curvatures, measured)
        weight = self._weight_of_old(states[0], group)
        for state in states:
            state["step"] += 1
            state["measurements"] += measures
        steps = self._diagonal_cohort(params, group, measured).propose_(1.0, weight)
        hyper = effective(group)
        norms = [
            (step.square() * (s + hyper.prior + hyper.damping)).sum() for step, s in zip(steps, curvatures, strict=True)
        ]
        return Move(params, states, group, steps, torch.stack(norms).sum())

    def _clip_factor(self, moves: list[Move]) -> float:
        """The factor on the whole step, at most 1, that keeps its Fisher norm at or below the bound."""
        bound = self.param_groups[0]["kl_clip"]
        if bound is None:
            return 1.0
        rates = [self.step_of(move.group).rate(float(move.group["lr"])) for move in moves]
        norms = [move.norm * rate**2 for move, rate in zip(moves, rates, strict=True) if move.norm is not None]
        return float(clipped_lr(1.0, torch.stack([norm.to(norms[0].device) for norm in norms]).sum(), bound))
