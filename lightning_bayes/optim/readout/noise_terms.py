"""The covariance of parameters with a diagonal posterior, from parameter group and optimizer state.

`posteriors.shaped_noise` has the equations of the shape. With per-weight priors, δ̃ of each weight counts as curvature
(`optim.weight_prior`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.posteriors import NoiseShape, noise_shape, noise_statistics
from lightning_bayes.private_torch import version_of

State: TypeAlias = Mapping[str, Any]


def is_noisy(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a parameter is sampled."""
    return bool(group["posterior"]["noisy"] and state.get("noisy"))


def noise_hyperparameters(group: Mapping[str, Any], state: Mapping[str, Any]) -> Effective:
    """Effective hyperparameters of a parameter's noise: without the prior if δ̃ of each weight counts as curvature."""
    return effective(group).without_prior() if "prior_precision" in state else effective(group)


def noise_curvature(hyperparameters: Effective, state: Mapping[str, Any]) -> Tensor:
    """The curvature that determines a parameter's noise: s, or s + δ̃ if the parameter has per-weight priors.

    Args:
        hyperparameters: The result of `noise_hyperparameters`.
        state: The optimizer state of the parameter, which has a diagonal posterior.

    Returns:
        A tensor shaped like the parameter, which may be the one in the state.
    """
    curvature: Tensor = state["curvature"]
    precision = state.get("prior_precision")
    return curvature if precision is None else curvature + hyperparameters.prior_of(precision)


def shape_of(
    group: Mapping[str, Any], states: Sequence[Mapping[str, Any]], means: Sequence[Tensor]
) -> NoiseShape | None:
    """The shape of the noise of parameters with a diagonal posterior, of one device and dtype.

    Args:
        group: Their parameter group.
        states: Their optimizer states.
        means: μ of each.

    Returns:
        Ñ/τ_t and γ_t of each parameter, γ_t without the δ̃ of per-weight priors; None for the noise of the bound.
    """
    hyperparameters = noise_hyperparameters(group, states[0])
    if hyperparameters.relative_noise is None:
        return None
    statistics = _stored_statistics(hyperparameters, states)
    if statistics is None:
        statistics = [_current_statistics(hyperparameters, *pair) for pair in zip(states, means, strict=True)]
    return noise_shape(torch.stack(statistics), hyperparameters.relative_noise, hyperparameters.scale)


def store_statistics(group: Mapping[str, Any], state: dict[str, Any], mean: Tensor) -> None:
    """Store the statistics that determine the shape of the noise of a parameter with a diagonal posterior.

    They change much more slowly than the curvature of methods that measure it in every update.

    Args:
        group: The parameter group.
        state: The optimizer state.
        mean: μ.
    """
    hyperparameters = noise_hyperparameters(group, state)
    state["noise_statistics"] = _current_statistics(hyperparameters, state, mean)
    state["noise_statistics_of"] = _arguments(hyperparameters, state)


def _stored_statistics(hyperparameters: Effective, states: Sequence[State]) -> list[Tensor] | None:
    """The statistics in the states of a cohort; None unless all were stored with the current hyperparameters."""
    arguments = _arguments(hyperparameters, states[0])
    if any(state.get("noise_statistics_of") != arguments for state in states):
        return None
    return [state["noise_statistics"] for state in states]


def _current_statistics(hyperparameters: Effective, state: Mapping[str, Any], mean: Tensor) -> Tensor:
    curvature = noise_curvature(hyperparameters, state)
    stated, flatness = hyperparameters.stated_damping, hyperparameters.noise_flatness
    return noise_statistics(curvature, mean, state["initial_rms"], stated, flatness)


def _arguments(hyperparameters: Effective, state: Mapping[str, Any]) -> tuple[float, ...]:
    """The hyperparameters that the statistics depend on: p, ε and, with per-weight priors, Ñ/τ."""
    scale = (hyperparameters.scale,) if "prior_precision" in state else ()
    return hyperparameters.stated_damping, hyperparameters.noise_flatness, *scale


class _CacheKey(NamedTuple):
    """The numbers and tensors that a cached result was computed from."""

    numbers: tuple[float, ...]
    tensors: list[Tensor]

    def is_same(self, other: _CacheKey | None) -> bool:
        """Whether the numbers are equal and the tensors the very same."""
        if other is None or self.numbers != other.numbers:
            return False
        return list(map(id, self.tensors)) == list(map(id, other.tensors))


@final
class NoiseTerms:
    """What determines the covariance of a cohort, kept until it changes.

    Attributes:
        hyperparameters: Their effective hyperparameters.
        shape: The shape of the noise; None for the noise of the bound.
        curvatures: The curvature of each parameter, as in `noise_curvature`.
    """

    hyperparameters: Effective

    def __init__(self) -> None:
        self.shape: NoiseShape | None = None
        self.curvatures: list[Tensor] = []
        self._shape_key: _CacheKey | None = None
        self._key: _CacheKey | None = None

    def refresh(self, group: Mapping[str, Any], states: Sequence[State], means: Sequence[Tensor]) -> bool:
        """Read the terms again if anything has changed; arguments as in `shape_of`.

        Returns:
            Whether the covariance may have changed, apart from the scale of its shape.
        """
        self.hyperparameters = hyper = noise_hyperparameters(group, states[0])
        self._refresh_shape(group, states, means)
        curvatures = [state["curvature"] for state in states]
        numbers = tuple(hyper.precision_arguments.values()) if self.shape is None else ()
        scale = hyper.scale if "prior_precision" in states[0] else 0.0  # δ̃ of each weight depends on it
        damping = [] if self.shape is None else [self.shape.damping]
        key = _CacheKey((*numbers, scale, *map(version_of, curvatures)), [*curvatures, *damping])
        if key.is_same(self._key):
            return False
        self._key, self.curvatures = key, [noise_curvature(hyper, state) for state in states]
        return True

    def _refresh_shape(self, group: Mapping[str, Any], states: Sequence[State], means: Sequence[Tensor]) -> None:
        relative_noise, scale = self.hyperparameters.relative_noise, self.hyperparameters.scale
        stored = None if relative_noise is None else _stored_statistics(self.hyperparameters, states)
        key = None if relative_noise is None or stored is None else _CacheKey((relative_noise, scale), stored)
        if key is None or not key.is_same(self._shape_key):  # without stored statistics, they are the current ones
            self._shape_key, self.shape = key, shape_of(group, states, means)
