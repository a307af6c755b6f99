"""Defaults of a fit: the step that updates the mean, the curvature interval and the noise."""

from __future__ import annotations

from typing import NamedTuple, get_args

from lightning_bayes.callbacks.fields import CallbackArguments
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.default_noise import DefaultNoise
from lightning_bayes.optim.hyperparameters import StepName
from lightning_bayes.optim.measuring import BASE_INTERVAL, require_interval


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
