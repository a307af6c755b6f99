"""Defaults of a fit: the step that updates the mean, the curvature interval, the noise and the prior."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final, get_args

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_bayes.callbacks.fields import CallbackArguments
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import PriorMean, Schedule, VariationalOptimizer, value_at
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.hyperparameters import StepName
from lightning_bayes.optim.runtime.measuring import require_interval
from lightning_bayes.optim.runtime.parameters import has_convolutions, has_norms
from lightning_bayes.optim.steps.base_optimizer import (
    FLATNESS_OF_CLASSIFIERS,
    FLATNESS_OF_CONVOLUTIONS,
    NOISE_OF_CLASSIFIERS,
    NOISE_OF_CONVOLUTIONS,
    NOISE_OF_NORMALISED,
    NOISE_OF_REGRESSIONS,
    PRIOR_PRECISION,
    count_noisy_layers,
    noise_of_depth,
)
from lightning_bayes.posteriors.shaped_noise import FLATNESS
from lightning_bayes.predictive import Link

_INTERVAL = 10  # T if the user's optimizer updates the mean
_NATURAL_PRIOR_PRECISION = 1.0  # δ if the user's optimizer does not update the mean
_STRONG_PRIOR = 10.0  # a prior precision that hurt small networks


class ChosenDefaults(NamedTuple):
    """The arguments of a callback, with values for those that the user did not pass."""

    arguments: CallbackArguments  # `group_defaults` hold the chosen step_rule, curvature_interval and relative_noise
    noise: DefaultNoise | None  # None if the user sets the noise
    prior: DefaultPrior
    is_default_interval: bool
    grafts: bool  # whether the user's optimizer only sets the length of the step, see `optim.steps.graft`


def choose_defaults(callback: str, arguments: CallbackArguments) -> ChosenDefaults:
    """Choose the step, the curvature interval, the first noise scale and the prior.

    The default interval is 10 if the user's optimizer steps, and the curvature only shapes the noise (or, if `grafts`, the
    direction of the step). It is 1 if the curvature divides the gradient, or costs nothing.

    Args:
        callback: Name of the callback's class, for messages.
        arguments: The callback's arguments.

    Returns:
        The defaults.
    """
    group, optimizer_class = arguments.group_defaults, arguments.optimizer_class
    noise = None
    if arguments.lr is None and group["relative_noise"] is None:
        noise = DefaultNoise(group["noise_flatness"])
    grafts = _grafts(callback, arguments)
    prior = DefaultPrior(arguments.prior_precision, group["prior_mean"])
    step_rule = "natural" if arguments.lr is not None else optimizer_class.default_step
    interval = group["curvature_interval"]
    if interval is None:
        interval = _INTERVAL if step_rule == "user" and optimizer_class.amortises else 1
    require_interval(callback, interval, amortises=optimizer_class.amortises)
    chosen = {
        "step_rule": step_rule,
        "curvature_interval": interval,
        "relative_noise": group["relative_noise"] if noise is None else noise.first,
    }
    completed = arguments._replace(group_defaults=group | chosen)
    return ChosenDefaults(completed, noise, prior, group["curvature_interval"] is None, grafts)


def _grafts(callback: str, arguments: CallbackArguments) -> bool:
    """Whether to graft the natural direction onto the user's step; raises if `step` contradicts `lr` or the optimizer."""
    lr, step = arguments.lr, arguments.step
    if step not in {None, *get_args(StepName)}:
        raise HyperparameterError(f"{callback} got step={step!r}. Pass 'user', 'natural' or nothing.")
    default = arguments.optimizer_class.default_step
    if step == "user" and (lr is not None or default != "user"):
        reason = "it would then be the user's optimizer alone" if lr is None else f"lr={lr!r} sets the natural step"
        raise HyperparameterError(f"{callback} got step='user', but {reason}. Omit step='user'.")
    grafts = lr is None and step == "natural" and default == "user"
    if grafts and not arguments.optimizer_class.can_graft:
        raise HyperparameterError(
            f"{callback} got step='natural' without lr, but its direction has no elementwise curvature. Pass lr=... for "
            "the paper's step, or omit step."
        )
    return grafts


@final
class DefaultNoise:
    """κ and ε, chosen by the kind of prediction, the kind of network and the number of noisy layers.

    Args:
        flatness: ε; None to choose it.
    """

    first = NOISE_OF_REGRESSIONS  # κ before the loss is known

    def __init__(self, flatness: float | None) -> None:
        self.flatness = flatness
        self._applied: tuple[VariationalOptimizer, int] | None = None

    def apply(self, optimizer: VariationalOptimizer, link: Link | None) -> None:
        """Set κ and ε in all groups after the first update, and again when layers are frozen or unfrozen."""
        layers = count_noisy_layers(optimizer.param_groups, optimizer.state)
        if self._applied == (optimizer, layers):
            return
        self._applied = (optimizer, layers)
        scale, flatness = _noise_of(optimizer.model, link)
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["relative_noise"] = noise_of_depth(scale, layers)
            group["noise_flatness"] = self.flatness or flatness


def _noise_of(model: nn.Module, link: Link | None) -> tuple[float, float]:
    """κ for up to five layers, and ε."""
    if link not in {"softmax", "sigmoid"}:
        return NOISE_OF_REGRESSIONS, FLATNESS
    if has_norms(model):
        return NOISE_OF_NORMALISED, FLATNESS
    if has_convolutions(model):
        return NOISE_OF_CONVOLUTIONS, FLATNESS_OF_CONVOLUTIONS
    return NOISE_OF_CLASSIFIERS, FLATNESS_OF_CLASSIFIERS


@final
class DefaultPrior:
    """δ: the user's value, else the value that the optimizer's L2 penalty implies, else a constant.

    Args:
        precision: δ; None if the user passes none.
        mean: μ₀ of the prior.
    """

    def __init__(self, precision: float | Schedule | None, mean: PriorMean) -> None:
        self.precision = precision
        self._is_stated = precision is not None or mean != "zero"

    def first(self, has_base: bool) -> float | Schedule:
        """δ before N is known: the user's δ, else a constant, which is smaller if the user's optimizer updates the mean."""
        if self.precision is not None:
            return self.precision
        return PRIOR_PRECISION if has_base else _NATURAL_PRIOR_PRECISION

    def mark(self, groups: Iterable[dict[str, Any]]) -> None:
        """Set ``prior_on_mean`` in each group: whether the prior acts on the mean in the default step."""
        for group in groups:
            group["prior_on_mean"] = self._is_stated or group["l2_penalty"] > 0

    def take_penalty(self, group: dict[str, Any]) -> None:
        """Convert a group's L2 penalty to its prior precision, δ = Ñ·wd/τ, unless the user passes a precision."""
        if self.precision is None and group.get("l2_penalty"):
            # The optimizer's defaults may hold schedules.
            values = {name: value_at(value, group["step"]) for name, value in group.items()}
            group["prior_precision"] = group["l2_penalty"] * effective(values).num_data / values["kl_weight"]

    def warn_if_strong(self, groups: list[dict[str, Any]]) -> None:
        """Warn if a weight decay implies a strong prior."""
        strongest = max(groups, key=lambda group: float(group["prior_precision"]))
        if self.precision is None and strongest["prior_precision"] > _STRONG_PRIOR:
            rank_zero_warn(
                f"weight_decay={strongest['l2_penalty']:g} with {effective(strongest).num_data:g} examples implies a prior "
                f"precision of {strongest['prior_precision']:.4g}, which is strong. Pass prior_precision=1.0 for a weaker "
                "prior."
            )
