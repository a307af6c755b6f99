"""What a K-FAC optimizer measures and keeps: layers' factors, inverses and roots, the noise they give, the posterior.

Every T_stats updates the passes measure; in turns, every T_inv updates, a layer's factors are inverted. Averages start
from a single batch, so the early ones change fast: inverses are also renewed at the measurements 1, 2, 4, 8, and so on.

The trust region's noise floor is for a matrix what it is for a single weight, a damping of the noise alone,

    γ_l = (τ/Ñ) / (κ r_l)²        in the noise: (S + √(δ̃+γ_l)/π I) ⊗ (A + π√(δ̃+γ_l) I)

which keeps every weight's standard deviation below κ r_l, because the π-split only ever adds to S ⊗ A + (δ̃+γ_l) I.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Capture, Likelihood
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine, Request
from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.hyperparameters import Hyperparameters, MeanFieldArguments, effective
from lightning_bayes.optim.kronecker import matrix_state
from lightning_bayes.optim.kronecker.intervals import check_intervals, is_due, is_power_of_two
from lightning_bayes.optim.kronecker.kronecker_passes import KroneckerPasses
from lightning_bayes.optim.kronecker.matrix_layers import Division, MatrixLayer, divide
from lightning_bayes.optim.kronecker.shared_inversions import Partners, invert_together
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.schedules import Schedule
from lightning_bayes.optim.settings import POSITIVE, POSITIVE_COUNT, setting
from lightning_bayes.optim.steps import trust_region
from lightning_bayes.posteriors import layer_floored, require_memory

DEFAULT_MAX_SIDE = 4096  # such a factor takes 64 MiB in float32


@dataclass(frozen=True, kw_only=True)
class KroneckerHyperparameters(Hyperparameters):
    """With a bound of the step's Fisher norm."""

    kl_clip: float | None = setting(POSITIVE, upper_limit=1e12, schedulable=True, optional=True)
    max_side: int = setting(POSITIVE_COUNT, default=DEFAULT_MAX_SIDE, in_group=False)


class MatrixOptimizer(MeanFieldOptimizer):
    """A mean-field optimizer whose linear layers and convolutions have matrices; see the head of this module.

    Args:
        model: See `MeanFieldOptimizer`.
        params: See there.
        stats_interval: T_stats, updates between measurements of the curvature.
        inverse_interval: T_inv, updates between inversions of a layer's factors; layers take turns.
        max_side: Layers with a longer side of their matrix are treated as mean-field.
        limit_mib: Memory in MiB that factors, inverses and roots may take together.
        fisher: ``"sampled"`` draws labels from the model's likelihood, for the Fisher; ``"empirical"`` takes the data's.
            None draws them where a likelihood is known.
        likelihood: Of the model's outputs; None looks for a `Likelihood` in the model's attribute ``likelihood``.
        kl_clip: c, bound of the squared Fisher norm of the whole step, see `optim.kronecker.kl_clip`; None for none. Zhang
            et al. take ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        **fields: See `MeanFieldOptimizer`.

    Raises:
        HyperparameterError: If a value lies outside of its range.
    """

    measures = "kronecker"
    hyperparameters = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ counts measurements, not updates

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
        **fields: Unpack[MeanFieldArguments],
    ) -> None:
        check_intervals(stats_interval, inverse_interval)
        check_fisher(fisher)
        self._divided: tuple[Any, Division] | None = None  # and what it depends on
        self._partners: Partners | None = None
        self.stats_interval, self.inverse_interval = stats_interval, inverse_interval
        self.max_side, self.limit_mib, self.fisher, self._likelihood = max_side, limit_mib, fisher, likelihood
        super().__init__(model, params, own={"kl_clip": kl_clip, "max_side": max_side}, **fields)
        self._passes: KroneckerPasses = KroneckerPasses(self.engine.workspace)
        label_source(fisher, likelihood, model)  # refuses a likelihood that cannot be sampled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `MeanFieldOptimizer.add_param_group`. Refuses factors that do not fit into memory.

        Args:
            param_group: The group.
        """
        super().add_param_group(param_group)
        layers = self.division().layers
        sizes = [groups * (rows**2 + columns**2) for groups, rows, columns in (layer.shape for layer in layers)]
        if layers:
            kept = {"factors": True, "inverses": self.user_step is None, "roots": self.noisy}
            kinds = [kind for kind, is_kept in kept.items() if is_kept]
            require_memory(
                f"The Kronecker {', '.join(kinds)} of {len(layers)} layers",
                len(kinds) * sum(sizes),
                layers[0].weight.element_size(),
                self.limit_mib,
                f"a smaller max_side than {self.max_side}",
            )

    def division(self) -> Division:
        """Which layers have matrices now."""
        # Loading a state makes new groups.
        groups = [(id(group), [param.requires_grad for param in group["params"]]) for group in self.param_groups]
        if self._divided is None or self._divided[0] != groups:
            self._divided = groups, divide(self.model, self.param_groups, self._are_alike, self.max_side)
        return self._divided[1]

    def _are_alike(self, weight: nn.Parameter, bias: nn.Parameter) -> bool:
        return (weight in self._points) == (bias in self._points)

    def summary(self) -> str:
        """What is measured where, in one sentence for a log."""
        division, likelihood = self.division(), label_source(self.fisher, self._likelihood, self.model)
        labels = "those of the data (empirical Fisher)"
        if likelihood is not None:
            labels = f"drawn from {type(likelihood).__name__} (Fisher)"
        long = [f"{name} (side {side} > max_side={self.max_side})" for name, side in division.too_long.items()]
        others = ", ".join([*long, *division.others]) or "none"
        return (
            f"{type(self).__name__}: Kronecker factors for {len(division.layers)} layers, labels {labels}, measured every "
            f"{self.stats_interval} and inverted every {self.inverse_interval} updates; mean-field: {others}."
        )

    # -- passes -------------------------------------------------------------------------------------------------------

    def _layers(self) -> list[MatrixLayer]:
        layers = self.division().layers
        for layer in layers:
            matrix_state.drop_if_of_another_shape(self.state[layer.weight], layer)
        return layers

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """As in `MeanFieldOptimizer`, without the parameters of matrices."""
        inside = {param for layer in self._layers() for param in layer.params}
        cohorts = [[p for p in cohort if p not in inside] for cohort in super()._cohorts(group)]
        for param in (param for cohort in cohorts for param in cohort if "curvature" not in self.state[param]):
            self.state[param]["curvature"] = torch.zeros_like(param)  # it was part of a matrix before
        return [cohort for cohort in cohorts if cohort]

    def _state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._state(param, group)
        state.setdefault("measurements", 0)
        return state

    def _measures_now(self) -> bool:
        """Whether the passes of the open update measure the curvature."""
        is_new = any(self._state(param, group)["measurements"] == 0 for group, param in self._trained())
        return is_new or is_due(self.num_updates + 1, self.stats_interval)

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        assert isinstance(self.engine, KroneckerEngine)
        if not self._measures_now():
            return self.engine.capture()
        layers = {layer.module: layer.has_bias for layer in self._layers()}
        labels = label_source(self.fisher, self._likelihood, self.model)
        return self.engine.capture(Request(layers, labels, self._label_seed(sample), loss_scale))

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        sample = super()._sample(noise)
        for layer in self._noisy_layers():
            drawn = [self._buffer(param) for param in layer.params]
            noise.fill_(drawn)
            means = [param.detach() for param in layer.params]
            weights = matrix_state.draw(self.state[layer.weight], layer.matrix(means), layer.matrix(drawn), layer.group)
            torch._foreach_copy_(drawn, layer.tensors(weights))
            sample.update(zip(layer.params, drawn, strict=True))
        return sample

    def _noisy_layers(self) -> Iterator[MatrixLayer]:
        """Layers that have noise now, their curvature started where `init_precision` says it."""
        for layer in self._layers():
            state, group = self.state[layer.weight], layer.group
            if not (group["noisy"] and state["noisy"]):
                continue
            effective(group)  # N must be known
            if "input_factor" not in state and group["init_precision"] is not None:
                matrix_state.start_at_precision(state, layer)
                matrix_state.invert(state, layer, self._inverted(layer))
                self._forget_single_curvatures(layer)
            if "input_root" in state:
                yield layer

    def _curvature_of_pass(self, captured: Capture, loss_scale: float, sample: int) -> dict[nn.Parameter, Tensor]:
        if not isinstance(captured, KroneckerCapture):
            return {}
        factors = captured.mean_factors()
        if loss_scale != 1:
            for found in factors.values():
                found.factors[0].div_(loss_scale**2)
        self._passes.add_factors(factors, captured.num_examples)
        captured.mean_curvature()
        return captured.scaled_squares(1 / loss_scale**2)

    def _measured(self) -> list[Tensor]:
        params = [param for _, param in self._trained()]
        return self._passes.all_tensors(params, self._layers(), self._measures_now())

    # -- curvature and posterior --

    def share_inversions(self, partners: Partners | None) -> None:
        """Let the processes that train together invert a part of the layers each, instead of every process all of them.

        Args:
            partners: The processes, this one among them; None for this one alone.
        """
        self._partners = partners

    def _average_factors(self, layer: MatrixLayer) -> None:
        state = self.state[layer.weight]
        matrix_state.take(state, self._passes.factors[layer.weight], self._weight_of_old(state, layer.group))
        for param in layer.params:
            self.state[param]["measurements"] = state["measurements"]
        self._forget_single_curvatures(layer)

    def _is_due(self, layer: MatrixLayer, delay: int, measures: bool) -> bool:
        """Whether it is the layer's turn to be inverted."""
        is_early = measures and is_power_of_two(self.state[layer.weight]["measurements"])
        return is_early or is_due(self.num_updates + 1, self.inverse_interval, delay)

    def _inverted(self, layer: MatrixLayer) -> list[str]:
        """What is needed of a layer's factors: the inverse by the step, the root by the noise."""
        is_noisy = layer.group["noisy"] and self.state[layer.weight]["noisy"]
        needed = {"inverse": self.user_step is None, "root": is_noisy}
        return [kind for kind, is_needed in needed.items() if is_needed]

    def _invert(self, layers: list[MatrixLayer]) -> None:
        """Refresh the layers' inverses and roots, together with the partners where that is sooner done."""
        kinds = {layer: self._inverted(layer) for layer in layers if self._inverted(layer)}

        def invert(layer: MatrixLayer) -> None:
            matrix_state.invert(self.state[layer.weight], layer, kinds[layer])

        if self._partners is not None and len(kinds) > 1:  # a single layer is inverted sooner than sent
            states = [self.state[layer.weight] for layer in kinds]
            invert_together(list(kinds), states, list(kinds.values()), invert, self._partners)
        else:
            for layer in kinds:
                invert(layer)

    def _forget_single_curvatures(self, layer: MatrixLayer) -> None:
        for param in layer.params:
            self.state[param].pop("curvature", None)

    def _weight_of_old(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        beta: float = group["betas"][1]
        is_paper_s = group["step_rule"] == "natural"
        return beta if is_paper_s else trust_region.weight_of_old(beta, state["measurements"] + 1)

    def _start_noise(self) -> None:
        super()._start_noise()
        for _ in self._noisy_layers():
            pass

    def _floored(self) -> Iterator[tuple[Tensor, int]]:
        yield from super()._floored()
        for layer in self._noisy_layers():
            if layer.group["relative_noise"] is not None:
                yield (
                    layer_floored(layer.group, self.state[layer.weight], layer.weight.detach()),
                    sum(param.numel() for param in layer.params),
                )
