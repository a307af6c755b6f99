"""The base of K-FAC and Noisy K-FAC: matrices in linear layers and convolutions, VOGN everywhere else.

Every T_stats updates the passes measure; in turns, every T_inv updates, a layer's factors are inverted
(`optim.kronecker.intervals`).

The matrices take the paper's step (`layer_update`), or the bounded one of `optim.steps.trust_region`, tensor by tensor, or
that of the user's optimizer (`optim.steps.base_optimizer`), for which only the posterior is K-FAC's.
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
    """A mean-field optimizer whose linear layers and convolutions have matrices; see the head of this module.

    Class attributes:
        layer_state_type: The state that enters a layer's step.
        layer_update: The paper's pure update of one layer.
        average_factors: The paper's pure average of a layer's factors.

    Args:
        model: See `MeanFieldOptimizer`.
        params: See there.
        stats_interval: T_stats, updates between measurements of the curvature.
        inverse_interval: T_inv, updates between inversions of a layer's factors; layers take turns.
        max_side: Layers with a longer side of their matrix are treated as mean-field.
        limit_mib: Memory in MiB that factors, inverses and roots may take together.
        fisher: ``"sampled"`` draws labels from the model's likelihood, for the Fisher; ``"empirical"`` takes the data's.
            None draws them where a likelihood is known. With ``engine="backpack"`` it counts for the other layers.
        likelihood: The likelihood of the outputs; None looks for a `Likelihood` in the model's attribute ``likelihood``.
        kl_clip: c, bound of the squared Fisher norm of the whole step, see `optim.kronecker.kl_clip`; None for none. Zhang
            et al. take ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        factors: ``"kfac"`` by either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``, which reads the labels'
            likelihood from the loss. See `optim.kronecker.factor_source`.
        unsupported_layers: The treatment of layers that ``engine="backpack"`` has no factors for: ``"refuse"``,
            ``"mean_field"``, or ``"fused"`` for our own rules.
        **fields: See there.

    Raises:
        HyperparameterError: If a value lies outside of its range.
    """

    averages_curvature = True
    can_graft = False
    estimator = KroneckerFactorsEstimator()
    hyperparameters: ClassVar[type[Hyperparameters]] = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ counts measurements, not updates
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
        self._divided: tuple[Any, Division] | None = None  # and what it depends on
        self._workers: WorkerGroup | None = None
        self.stats_interval, self.inverse_interval = stats_interval, inverse_interval
        self.max_side, self.limit_mib, self.fisher, self._likelihood = max_side, limit_mib, fisher, likelihood
        self.factors, self.unsupported_layers = factors, unsupported_layers
        self.estimator = KroneckerFactorsEstimator(factors)  # type: ignore[misc]
        super().__init__(model, params, own={"kl_clip": kl_clip, "max_side": max_side}, **fields)
        label_source(fisher, likelihood, model)  # refuses a likelihood that cannot be sampled

    @abstractmethod
    def _inverted(self, kind: str, layer: MatrixLayer, curvature: KroneckerProduct, now: Effective) -> KroneckerProduct:
        """Invert a layer's curvature into the product `kind` of `_kinds`."""

    def _kinds(self, layer: MatrixLayer) -> list[str]:
        """The products that an inversion of the layer yields: ``"inverse"`` for the step, ``"root"`` for the noise."""
        return ["inverse"] if self.base_step is None else []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `MeanFieldOptimizer.add_param_group`. Refuses factors that do not fit into memory.

        Args:
            param_group: The group.
        """
        super().add_param_group(param_group)
        if self.unsupported_layers == "refuse" and self._factor_engine.has_factors is not has_factors:
            require_factors(self.model, self.division(), self._factor_engine)
        layers = self.division().layers
        sizes = [groups * (rows**2 + columns**2) for groups, rows, columns in (layer.shape for layer in layers)]
        if layers:
            kept = {"factors": True, "inverses": self.base_step is None, "roots": self.noisy}
            kinds = [kind for kind, is_kept in kept.items() if is_kept]
            require_memory(
                f"The Kronecker {', '.join(kinds)} of {len(layers)} layers",
                len(kinds) * sum(sizes),
                layers[0].weight.element_size(),
                self.limit_mib,
                f"a smaller max_side than {self.max_side}",
            )

    def division(self) -> Division:
        """The layers that have matrices now."""
        # Loading a state makes new groups.
        groups = [(id(group), [param.requires_grad for param in group["params"]]) for group in self.param_groups]
        if self._divided is None or self._divided[0] != groups:
            self._divided = (
                groups,
                divide(
                    self.model,
                    self.param_groups,
                    self._are_alike,
                    self.max_side,
                    layer_rule(self._factor_engine, self.unsupported_layers),
                ),
            )
        return self._divided[1]

    def _are_alike(self, weight: nn.Parameter, bias: nn.Parameter) -> bool:
        return (weight in self._points) == (bias in self._points)

    def summary(self) -> str:
        """The curvature of every layer, in one sentence for a log."""
        division, labels = self.division(), self._labels_in_words()
        long = [f"{name} (side {side} > max_side={self.max_side})" for name, side in division.too_long.items()]
        others = ", ".join([*long, *division.others]) or "none"
        return (
            f"{type(self).__name__}: Kronecker factors for {len(division.layers)} layers, labels {labels}, measured every "
            f"{self.stats_interval} and inverted every {self.inverse_interval} updates; mean-field: {others}."
        )

    def _labels_in_words(self) -> str:
        if self._factor_engine.has_factors is not has_factors:
            drawn = "drawn from the loss's likelihood" if self.factors == "kfac" else "none"
            return f"{drawn} ({self.factors} by BackPACK)"
        likelihood = label_source(self.fisher, self._likelihood, self.model)
        if likelihood is None:
            return "those of the data (empirical Fisher)"
        return f"drawn from {type(likelihood).__name__} (Fisher)"

    # -- passes -------------------------------------------------------------------------------------------------------

    def _layers(self) -> list[MatrixLayer]:
        return self.division().layers

    def _forget_other_shapes(self) -> None:
        """Let layers whose bias was frozen or unfrozen start again."""
        for layer in self._layers():
            layer_state.drop_if_of_another_shape(self.state[layer.weight], layer)

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """The cohorts of `MeanFieldOptimizer` without the parameters of matrices."""
        inside = {param for layer in self._layers() for param in layer.params}
        cohorts = [[p for p in cohort if p not in inside] for cohort in super()._cohorts(group)]
        for param in (param for cohort in cohorts for param in cohort if "curvature" not in self.state[param]):
            self.state[param]["curvature"] = torch.zeros_like(param)  # it was part of a matrix before
        return [cohort for cohort in cohorts if cohort]

    def _state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._state(param, group)
        state.setdefault("measurements", 0)
        return state

    def _kept(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        uses_update = self.step_of(group).uses_update
        return self.state_type._fields[1:] if uses_update else ("curvature",)

    def _measures_now(self) -> bool:
        """Whether the passes of the open update measure the curvature."""
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
        """Whether this package's rules measure anything; BackPACK draws its labels itself."""
        has_any = self._factor_engine.has_factors
        theirs = {param for layer in self._layers() if has_any(layer.module) for param in layer.params}
        return has_any is has_factors or any(param not in theirs for _, param in self._trained())

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        if not self._measures_now():
            return {}
        layers = self._layers()
        inside = {param for layer in layers for param in layer.params}
        shapes: dict[Hashable, Tensor] = {param: param for _, param in self._trained() if param not in inside}
        for layer in layers:
            shapes |= factor_shapes(layer)
        return zeros_where_missing(curvature, shapes)

    # -- curvature ----------------------------------------------------------------------------------------------------

    def share_inversions(self, workers: WorkerGroup | None) -> None:
        """Let the processes that train together invert some of the layers each, instead of every process all of them.

        Args:
            workers: The processes, this one among them; None for this one alone.
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
        state, now = self.state[layer.weight], effective(layer.group)
        curvature = layer_state.product(state, "factor")
        assert curvature is not None
        for kind in self._kinds(layer):
            layer_state.put(state, kind, self._inverted(kind, layer, curvature, now))

    def _forget_single_curvatures(self, layer: MatrixLayer) -> None:
        for param in layer.params:
            self.state[param].pop("curvature", None)

    def _weight_of_old(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        beta: float = group["betas"][1]
        return self.step_of(group).weight_of_old(beta, state["measurements"] + 1)

    # -- the update ---------------------------------------------------------------------------------------------------

    def _update_all(self, measurement: Measurement) -> None:
        for group in self.param_groups:
            effective(group)  # N must be known
        layers = self._layers()
        with layer_state.kept_on_error(self.state[param] for layer in layers for param in layer.params):
            self._refresh(layers, measurement)
        if self.base_step is None:
            self._step(layers, measurement)
        else:
            self._step_with(self.base_step, layers, measurement)
        self._finish_update(measurement)

    def _refresh(self, layers: list[MatrixLayer], measurement: Measurement) -> None:
        """Average what was measured into the factors, and invert those of the layers whose turn it is."""
        measures = bool(measurement.curvature)
        for layer in layers if measures else ():
            self._average_factors(layer, measurement)
        counts = [self.state[layer.weight]["measurements"] for layer in layers]
        due = [layers[i] for i in layers_due(counts, self.num_updates + 1, self.inverse_interval, measures=measures)]
        kinds = {layer: wanted for layer in due if (wanted := self._kinds(layer))}
        invert_all(kinds, self.state, self._invert_layer, self._workers)

    def _step(self, layers: list[MatrixLayer], measurement: Measurement) -> None:
        """The algorithm's own step."""
        moves = [move for layer in layers for move in self._layer_moves(layer)]
        for group in self.param_groups:
            moves += [self._other_move(params, group, measurement) for params in self._cohorts(group)]
        share = self._share(moves)
        for move in moves:
            move.share = share
            self.step_of(move.group).apply(move)

    def _step_with(self, step: BaseOptimizerStep, layers: list[MatrixLayer], measurement: Measurement) -> None:
        """The step of the user's optimizer, see `optim.steps`; the measurement shapes the posterior alone."""
        every = [(list(layer.params), layer.group) for layer in layers]
        for group in self.param_groups:
            for params in self._cohorts(group):
                every.append((params, group))
                if measurement.curvature:
                    self._average_squares(params, group, measurement)
        for params, group in every:
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
        centred, at = layer.matrix(layer.params).detach(), prior_means(states)
        if at:
            centred = centred - layer.matrix(at)
        for state in states:
            state["step"] += 1
        number = states[0]["step"]
        momentum = layer.matrix([state["momentum"] for state in states])
        found = type(self).layer_update(
            type(self).layer_state_type(centred, momentum, layer_state.product(states[0], "inverse")),
            layer.matrix([param.grad for param in layer.params if param.grad is not None]),
            beta=layer.group["betas"][0],
            prior=effective(layer.group).prior,
            step=number,
        )
        norms = layer.tensors(found.direction * found.corrected)
        for state, new in zip(states, layer.tensors(found.momentum), strict=True):
            state["momentum"] = new
        for param, group, part, norm in zip(
            layer.params, layer.groups, layer.tensors(found.direction), norms, strict=True
        ):
            yield Move([param], [self.state[param]], group, [part.neg()], norm.sum())

    def _other_move(self, params: list[nn.Parameter], group: dict[str, Any], measurement: Measurement) -> Move:
        measures = bool(measurement.curvature)
        states = [self.state[param] for param in params]
        curvatures = [state["curvature"] for state in states]
        has_started = self._start_curvature(params, group)
        measured = self._measured_curvature(params, group, measurement) if measures else curvatures
        if measures and not has_started:
            torch._foreach_copy_(curvatures, measured)
        weight = self._weight_of_old(states[0], group)
        for state in states:
            state["step"] += 1
            state["measurements"] += measures
        steps = self._diagonal_cohort(params, group, measured).propose_(1.0, weight)
        now = effective(group)
        norms = [
            (step.square() * (s + now.prior + now.damping)).sum() for step, s in zip(steps, curvatures, strict=True)
        ]
        return Move(params, states, group, steps, torch.stack(norms).sum())

    def _share(self, moves: list[Move]) -> float:
        """The share of the step that the bound of its Fisher norm leaves."""
        bound = self.param_groups[0]["kl_clip"]
        if bound is None:
            return 1.0
        rates = [self.step_of(move.group).rate(float(move.group["lr"])) for move in moves]
        norms = [move.norm * rate**2 for move, rate in zip(moves, rates, strict=True) if move.norm is not None]
        return float(clipped_lr(1.0, torch.stack([norm.to(norms[0].device) for norm in norms]).sum(), bound))
