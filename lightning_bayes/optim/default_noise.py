"""The default noise if another optimizer moves the means: κ and ε are chosen from loss, layer types and depth.

**Heuristics**, chosen on some seeds of the problems of ``python -m benchmarks.defaults`` and reported on others
(docs/defaults.md). Until the first update has shown the loss, κ is that of regressions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol, final

from torch import nn

from lightning_bayes.optim.groups import KEY
from lightning_bayes.optim.parameters import has_convolutions, has_norms
from lightning_bayes.posteriors.shaped_noise import FLATNESS

NOISE_OF_CLASSIFIERS = 0.07  # κ for classifiers without convolutions
FLATNESS_OF_CLASSIFIERS = 0.001  # ε for classifiers without convolutions
NOISE_OF_CONVOLUTIONS = 0.3  # κ for classifiers with convolutions
FLATNESS_OF_CONVOLUTIONS = 1.0  # ε for classifiers with convolutions
NOISE_OF_NORMALISED = 0.005  # κ for classifiers with normalisation layers, at least
MOST_NOISE_OF_NORMALISED = 2.0  # κ₁ of `callbacks.fit.noise_rule`, which no fit reaches
NOISE_OF_REGRESSIONS = 0.01  # κ for regression and unknown losses
SHALLOW = 5  # layers, as in LeNet; deeper networks get less noise


class NoisyGroups(Protocol):
    """What the policy needs of an optimizer; see `VariationalOptimizer`."""

    model: nn.Module
    state: Any
    posterior_defaults: dict[str, Any]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""

    def refresh_noise(self) -> None:
        """Store the covariance of the noise anew."""


@final
class DefaultNoise:
    """Chooses κ and ε after the first update, and again when layers are frozen or unfrozen; keeps a stated `flatness`."""

    first = NOISE_OF_REGRESSIONS

    def __init__(self, flatness: float | None) -> None:
        self.flatness = flatness
        self._applied: tuple[Any, int, float] | None = None

    def apply(self, optimizer: NoisyGroups, classifies: bool, share: float = 0.0) -> None:
        """Set κ and ε in all groups, for logits of classes or others; `share` of the largest κ follows the fit."""
        layers = count_noisy_layers(optimizer.param_groups, optimizer.state)
        if self._applied == (optimizer, layers, share):
            return
        self._applied = (optimizer, layers, share)
        scale, flatness = noise_of(optimizer.model, classifies)
        if follows_fit(optimizer.model, classifies):
            scale = max(scale, share * MOST_NOISE_OF_NORMALISED)
        chosen = {"relative_noise": noise_of_depth(scale, layers), "noise_flatness": self.flatness or flatness}
        of_groups = [group[KEY] for group in optimizer.param_groups]
        is_changed = any(settings[name] != value for settings in of_groups for name, value in chosen.items())
        for settings in (optimizer.posterior_defaults, *of_groups):
            settings.update(chosen)
        if is_changed:  # a resumed run keeps the scales of the noise that it restored
            optimizer.refresh_noise()


def follows_fit(model: nn.Module, classifies: bool) -> bool:
    """Whether a callback's κ follows the fit: for classifiers with normalisation layers."""
    return classifies and has_norms(model)


def noise_of(model: nn.Module, classifies: bool) -> tuple[float, float]:
    """κ for up to five layers, and ε, of a network whose outputs are logits of classes or others."""
    if not classifies:
        return NOISE_OF_REGRESSIONS, FLATNESS
    if has_norms(model):
        return NOISE_OF_NORMALISED, FLATNESS
    if has_convolutions(model):
        return NOISE_OF_CONVOLUTIONS, FLATNESS_OF_CONVOLUTIONS
    return NOISE_OF_CLASSIFIERS, FLATNESS_OF_CLASSIFIERS


def count_noisy_layers(groups: Iterable[Any], states: Any) -> int:
    """Count the layers that are trained with noise: tensors with two or more dimensions."""
    params = (param for group in groups if group[KEY]["noisy"] for param in group["params"])
    return sum(param.dim() > 1 and param.requires_grad and states[param].get("noisy", True) for param in params)


def noise_of_depth(noise: float, layers: int) -> float:
    """κ √(5 / L) for L layers above 5, else κ: every layer adds noise of about κ times its output, κ √L in total."""
    return noise * math.sqrt(SHALLOW / max(SHALLOW, layers))
