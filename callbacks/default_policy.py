"""The noise and the prior of a fit for which the user has stated none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final, get_args

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import MeanFieldOptimizer, PriorMean, Schedule, value_at
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.hyperparameters import StepName, StepRule
from lightning_bayes.optim.runtime.parameters import has_convolutions, has_norms
from lightning_bayes.optim.steps.base_optimizer import (
    FLATNESS_OF_CONVOLUTIONS,
    NOISE_OF_CLASSIFIERS,
    NOISE_OF_CONVOLUTIONS,
    NOISE_OF_NORMALISED,
    NOISE_OF_REGRESSIONS,
    PRIOR_PRECISION,
    noise_of_depth,
    noisy_layers,
)
from lightning_bayes.posteriors.shaped_noise import FLATNESS
from lightning_bayes.predictive import Link

_INTERVAL = 10  # T of the default step
_NATURAL_PRIOR_PRECISION = 1.0  # δ beside an explicit learning rate
_STRONG_PRIOR = 10.0  # a prior precision that hurt on small networks


def default_interval(optimizer_class: type[MeanFieldOptimizer], step_rule: StepRule) -> int:
    """T for which the user has stated nothing.

    Args:
        optimizer_class: The optimizer.
        step_rule: The rule that moves the mean.

    Returns:
        10 where another optimizer does and the curvature only shapes the noise; 1 where the curvature divides the gradient,
        or costs nothing.
    """
    return _INTERVAL if step_rule == "user" and optimizer_class.amortises else 1


class StepChoice(NamedTuple):
    """The step that moves the mean."""

    rule: StepRule
    grafts: bool  # whether the user's optimizer gives the length of a step only, see `optim.steps.graft`


def choose_step(
    callback: str, optimizer_class: type[MeanFieldOptimizer], lr: float | Schedule | None, step: StepName | None
) -> StepChoice:
    """The step that a callback's arguments ask for.

    Args:
        callback: Name of the callback's class, for messages.
        optimizer_class: The optimizer.
        lr: The learning rate of the papers' step, if any.
        step: ``"user"``, ``"natural"`` or None for the optimizer's own.

    Returns:
        The choice.

    Raises:
        HyperparameterError: If `step` does not fit the learning rate or the optimizer.
    """
    if step not in {None, *get_args(StepName)}:
        raise HyperparameterError(f"{callback} got step={step!r}. Pass 'user', 'natural' or nothing.")
    default = optimizer_class.default_step
    if step == "user" and (lr is not None or default != "user"):
        why = "nothing else would be left of it" if lr is None else f"lr={lr!r} is that of the natural step"
        raise HyperparameterError(f"{callback} got step='user', but {why}. Leave one of them out.")
    if lr is not None:
        return StepChoice("natural", grafts=False)
    grafts = step == "natural" and default == "user"
    if grafts and not optimizer_class.can_graft:
        raise HyperparameterError(
            f"{callback} got step='natural' without lr, but its direction has no elementwise curvature. Pass lr=..., the "
            "paper's step, or leave step out."
        )
    return StepChoice(default, grafts)


@final
class DefaultNoise:
    """κ and ε from the kind of prediction, the kind of network and the number of noisy layers.

    Args:
        flatness: ε, if the user states it.
    """

    first = NOISE_OF_REGRESSIONS  # κ before the loss is known

    def __init__(self, flatness: float | None) -> None:
        self.flatness = flatness
        self._applied: tuple[MeanFieldOptimizer, int] | None = None

    def apply(self, optimizer: MeanFieldOptimizer, link: Link | None) -> None:
        """Set κ and ε before the first update, and again after layers were thawed or frozen.

        Args:
            optimizer: The optimizer whose groups are changed.
            link: How outputs become predictions.
        """
        layers = noisy_layers(optimizer.param_groups, optimizer.state)
        if self._applied == (optimizer, layers):
            return
        self._applied = (optimizer, layers)
        scale, flatness = _noise_of(optimizer.model, link)
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["relative_noise"] = noise_of_depth(scale, layers)
            group["noise_flatness"] = self.flatness or flatness


def _noise_of(model: nn.Module, link: Link | None) -> tuple[float, float]:
    """κ of up to five layers, and ε."""
    if link not in {"softmax", "sigmoid"}:
        return NOISE_OF_REGRESSIONS, FLATNESS
    if has_norms(model):
        return NOISE_OF_NORMALISED, FLATNESS
    if has_convolutions(model):
        return NOISE_OF_CONVOLUTIONS, FLATNESS_OF_CONVOLUTIONS
    return NOISE_OF_CLASSIFIERS, FLATNESS


@final
class DefaultPrior:
    """δ: the user's if stated, else that of the optimizer's L2 penalty, else a constant.

    Args:
        precision: δ; None if the user states none.
        mean: μ₀ of the prior.
    """

    def __init__(self, precision: float | Schedule | None, mean: PriorMean) -> None:
        self.precision = precision
        self._is_stated = precision is not None or mean != "zero"

    def first(self, has_base: bool) -> float | Schedule:
        """δ before N is known.

        Args:
            has_base: Whether the user's optimizer updates the mean.

        Returns:
            The stated δ, else the constant of the step.
        """
        if self.precision is not None:
            return self.precision
        return PRIOR_PRECISION if has_base else _NATURAL_PRIOR_PRECISION

    def mark(self, groups: Iterable[dict[str, Any]]) -> None:
        """Note in each group whether the prior acts on the mean in the default step.

        Args:
            groups: Converted groups; changed in place.
        """
        for group in groups:
            group["prior_on_mean"] = self._is_stated or group["l2_penalty"] > 0

    def take_penalty(self, group: dict[str, Any]) -> None:
        """Turn the L2 penalty of a group into its prior precision, δ = Ñ·wd/τ, unless one is stated.

        Args:
            group: A group, or the optimizer's defaults, with N; changed in place.
        """
        if self.precision is None and group.get("l2_penalty"):
            now = {name: value_at(value, group["step"]) for name, value in group.items()}  # defaults may hold functions
            group["prior_precision"] = group["l2_penalty"] * effective(now).num_data / now["kl_weight"]

    def warn_if_strong(self, groups: list[dict[str, Any]]) -> None:
        """Warn of a weight decay that is a strong prior.

        Args:
            groups: Groups with their prior precision.
        """
        strongest = max(groups, key=lambda group: float(group["prior_precision"]))
        if self.precision is None and strongest["prior_precision"] > _STRONG_PRIOR:
            rank_zero_warn(
                f"weight_decay={strongest['l2_penalty']:g} over {effective(strongest).num_data:g} examples is the prior "
                f"precision {strongest['prior_precision']:.4g}, which is strong. Pass prior_precision=1.0 to choose another "
                "prior."
            )
