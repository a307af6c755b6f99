"""Defaults of a fit: the step that updates the mean, the curvature interval and the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final, get_args

from torch import Tensor, nn

from lightning_bayes.callbacks.fields import CallbackArguments
from lightning_bayes.callbacks.noise_rule import NoiseRule
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.hyperparameters import StepName
from lightning_bayes.optim.measuring import BASE_INTERVAL, require_interval
from lightning_bayes.optim.parameters import has_convolutions, has_norms
from lightning_bayes.optim.steps.base_optimizer import (
    FLATNESS_OF_CLASSIFIERS,
    FLATNESS_OF_CONVOLUTIONS,
    MOST_NOISE_OF_NORMALISED,
    NOISE_OF_CLASSIFIERS,
    NOISE_OF_CONVOLUTIONS,
    NOISE_OF_NORMALISED,
    NOISE_OF_REGRESSIONS,
    count_noisy_layers,
    noise_of_depth,
)
from lightning_bayes.posteriors.shaped_noise import FLATNESS
from lightning_bayes.predictive import Link

_CLASSES = frozenset({"softmax", "softmax_last", "sigmoid"})  # links of classifiers


class ChosenDefaults(NamedTuple):
    """The arguments of a callback, with values for those that the user did not pass."""

    arguments: CallbackArguments  # `group_defaults` hold the chosen step_rule, curvature_interval and relative_noise
    noise: DefaultNoise | None  # None if the user sets the noise
    is_default_interval: bool


def choose_defaults(callback: str, arguments: CallbackArguments) -> ChosenDefaults:
    """Choose the step, the curvature interval and the first noise scale."""
    group, optimizer_class = arguments.group_defaults, arguments.optimizer_class
    noise = None
    if arguments.lr is None and group["relative_noise"] is None:
        noise = DefaultNoise(group["noise_flatness"])
    _check_step(callback, arguments)
    step_rule = "natural" if arguments.lr is not None else optimizer_class.default_step
    interval = group["curvature_interval"]
    if interval is None:
        interval = BASE_INTERVAL if step_rule == "user" and optimizer_class.amortises else 1
    require_interval(callback, interval, amortises=optimizer_class.amortises)
    chosen = {
        "step_rule": step_rule,
        "curvature_interval": interval,
        "relative_noise": group["relative_noise"] if noise is None else noise.first,
    }
    completed = arguments._replace(group_defaults=group | chosen)
    return ChosenDefaults(completed, noise, group["curvature_interval"] is None)


def _check_step(callback: str, arguments: CallbackArguments) -> None:
    """Raise `HyperparameterError` if `step` contradicts `lr` or the optimizer."""
    lr, step, default = arguments.lr, arguments.step, arguments.optimizer_class.default_step
    if step not in {None, *get_args(StepName)}:
        raise HyperparameterError(f"{callback} got step={step!r}. Pass 'user', 'natural' or nothing.")
    if step == "user" and (lr is not None or default != "user"):
        reason = "it would then be the user's optimizer alone" if lr is None else f"lr={lr!r} sets the natural step"
        raise HyperparameterError(f"{callback} got step='user', but {reason}. Omit step='user'.")
    if step == "natural" and lr is None and default == "user":
        raise HyperparameterError(
            f"{callback} got step='natural' without lr. Pass lr=..., the learning rate of the paper's step, or omit step: "
            "the user's optimizer then moves the mean."
        )


@final
class DefaultNoise:
    """κ and ε, chosen by the kind of prediction, the kind of network, the number of noisy layers, and the fit so far.

    Attributes:
        rule: Moves κ of classifiers with normalisation layers.
    """

    first = NOISE_OF_REGRESSIONS  # κ before the loss is known

    def __init__(self, flatness: float | None) -> None:
        self.flatness, self.rule = flatness, NoiseRule()
        self._applied: tuple[VariationalOptimizer, int, float] | None = None

    def follows(self, model: nn.Module, link: Link | None) -> bool:
        """Whether κ follows the fit."""
        return link in _CLASSES and has_norms(model)

    def start_epoch(
        self, optimizer: VariationalOptimizer, link: Link | None, reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """Move κ by the losses of the last epoch, if it follows the fit; `reduce` sums over processes."""
        if self.follows(optimizer.model, link):
            self.rule.start_epoch(reduce)
            self.apply(optimizer, link)

    def add_loss(self, outputs: Any, accumulated: int) -> None:
        """Note the loss of a batch, which Lightning divides by the number of accumulated batches."""
        if isinstance(outputs, dict) and "loss" in outputs:
            self.rule.add(outputs["loss"] * accumulated)

    def apply(self, optimizer: VariationalOptimizer, link: Link | None) -> None:
        """Set κ and ε in all groups after the first update, and again when the rule moves κ or layers are frozen."""
        layers = count_noisy_layers(optimizer.param_groups, optimizer.state)
        if self._applied == (optimizer, layers, self.rule.share):
            return
        self._applied = (optimizer, layers, self.rule.share)
        scale, flatness = _noise_of(optimizer.model, link)
        if self.follows(optimizer.model, link):
            scale = max(scale, MOST_NOISE_OF_NORMALISED * self.rule.share)
        chosen = {"relative_noise": noise_of_depth(scale, layers), "noise_flatness": self.flatness or flatness}
        of_groups = [group["posterior"] for group in optimizer.param_groups]
        is_changed = any(settings[name] != value for settings in of_groups for name, value in chosen.items())
        for settings in (optimizer.posterior_defaults, *of_groups):
            settings.update(chosen)
        if is_changed:  # a resumed run keeps the scales of the noise that it restored
            optimizer.refresh_noise()


def _noise_of(model: nn.Module, link: Link | None) -> tuple[float, float]:
    """κ for up to five layers, and ε."""
    if link not in _CLASSES:
        return NOISE_OF_REGRESSIONS, FLATNESS
    if has_norms(model):
        return NOISE_OF_NORMALISED, FLATNESS
    if has_convolutions(model):
        return NOISE_OF_CONVOLUTIONS, FLATNESS_OF_CONVOLUTIONS
    return NOISE_OF_CLASSIFIERS, FLATNESS_OF_CLASSIFIERS
