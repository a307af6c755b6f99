"""A Gaussian posterior with a rescaled covariance: Σ → c² Σ around the same mean.

    θ = μ + c T ε        Σ_c = c² Σ        log det Σ_c⁻¹ = log det Σ⁻¹ - 2 D log c

BatchNorm in training subtracts the mean of its batch, and with it the part of the noise that moves this mean. In evaluation
it subtracts a running mean, which has to move with the weights. Where the layer before has the outputs z = w x + b,

    E z(θ_s) = E z(μ) + (w_s - μ_w) E x + (b_s - μ_b)

with E x the mean of the layer's inputs, for a convolution of its patches. Variances stay those from training.

At c = 0 the posterior is the point μ. All samples equal the mean, the variance is 0, the entropy is -∞, the KL from any
prior is ∞, and there is no density.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, final

from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict, strip_prefix
from lightning_bayes.posteriors.block_tridiagonal import BlockTridiagonal
from lightning_bayes.posteriors.eigen_gaussian import EigenGaussian
from lightning_bayes.posteriors.full_gaussian import FullGaussian
from lightning_bayes.posteriors.low_rank import LowRankGaussian
from lightning_bayes.posteriors.matrix_gaussian import MatrixGaussian
from lightning_bayes.posteriors.mean_field import MeanField

FAMILIES: Final[dict[str, type[Any]]] = {
    family.__name__: family
    for family in (MeanField, MatrixGaussian, EigenGaussian, FullGaussian, LowRankGaussian, BlockTridiagonal)
}


# By the name of a running mean: that of the weight before it, and E x, [groups, *inputs].
InputMeans: TypeAlias = Mapping[str, tuple[str, Tensor]]


@final
class ScaledPosterior(AbstractPosterior):
    """A posterior of any family, with all standard deviations multiplied by one number.

    Args:
        posterior: The posterior, of any family.
        scale: c, at least 0.
        linearized: Whether c was chosen for the linearised predictive. `mc_predict` then uses that predictive.
        temperature: T, which divides the logits of every sample in predictions; 1 keeps them. The density ignores it.
        input_means: E x of layers before BatchNorm, by the name of its running mean, with the name of the layer's weight.
            None: those of the posterior.

    Raises:
        PosteriorError: If c is negative, T is not positive, or one of them is not finite.
    """

    def __init__(
        self,
        posterior: AbstractPosterior,
        scale: float,
        linearized: bool = False,
        temperature: float = 1.0,
        input_means: InputMeans | None = None,
    ) -> None:
        if not 0 <= scale < math.inf:
            raise PosteriorError(f"scale={scale} must be at least 0 and finite: it multiplies the standard deviations.")
        if not 0 < temperature < math.inf:
            raise PosteriorError(f"temperature={temperature} must be positive and finite: it divides the logits.")
        self.posterior, self.scale, self.linearized = posterior, float(scale), linearized
        self.temperature = float(temperature)
        self.mean, self.constants = posterior.mean, posterior.constants
        self.prior_precision, self.prior_mean = posterior.prior_precision, posterior.prior_mean
        self.likelihood = posterior.likelihood
        self.num_data = posterior.num_data
        self.input_means: InputMeans = getattr(posterior, "input_means", {}) if input_means is None else input_means

    def statistics(self, weights: TensorDict) -> TensorDict:
        """Running means of BatchNorm with these weights, E z(θ_s)."""
        found = {}
        for name, (weight, inputs) in self.input_means.items():
            bias = f"{weight.removesuffix('weight')}bias"
            noise = (weights[weight] - self.mean[weight]).reshape(len(inputs), -1, inputs[0].numel())
            moved = (noise * inputs.reshape(len(inputs), 1, -1)).sum(-1).flatten()
            found[name] = self.constants[name] + moved + (weights[bias] - self.mean[bias] if bias in weights else 0)
        return found

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + c T ε."""
        weights = self.posterior.transform(noise)
        return {name: mean + self.scale * (weights[name] - mean) for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """c² diag Σ by parameter name."""
        return {name: self.scale**2 * variance for name, variance in self.posterior.variance().items()}

    def log_det_precision(self) -> Tensor:
        """Log det Σ⁻¹ - 2 D log c; infinite at c = 0."""
        change = -2 * self._size * math.log(self.scale) if self.scale else math.inf
        return self.posterior.log_det_precision() + change

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ) / c². Raises `PosteriorError` at c = 0, where there is no density."""
        if not self.scale:
            raise PosteriorError(
                "A posterior of scale 0 is a point without a density. Use posterior.posterior instead."
            )
        return self.posterior.squared_distance(weights) / self.scale**2

    def blocks(self) -> list[list[str]]:
        """The blocks of the unscaled posterior."""
        return self.posterior.blocks()

    def variance_along(self, directions: TensorDict) -> Tensor:
        """c² dᵀ Σ d."""
        return self.scale**2 * self.posterior.variance_along(directions)

    def variance_along_rows(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """c² dᵀ Σ d."""
        return self.scale**2 * self.posterior.variance_along_rows(name, left, right)

    def select(self, prefix: str) -> ScaledPosterior:
        """The marginal posterior of a submodule."""
        inputs = {
            name: (weight.removeprefix(prefix), mean)
            for name, (weight, mean) in strip_prefix(self.input_means, prefix).items()
        }
        selected = ScaledPosterior(self.posterior.select(prefix), self.scale, self.linearized, self.temperature, inputs)
        return selected.with_likelihood(self.likelihood)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and names only, safe for ``torch.load(..., weights_only=True)``."""
        return {
            "family": type(self.posterior).__name__,
            "posterior": self.posterior.state_dict(),
            "width": self.scale,
            "linearized": self.linearized,
            "temperature": self.temperature,
            "input_means": dict(self.input_means),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ScaledPosterior:
        """Inverse of `state_dict`."""
        inner = FAMILIES[state["family"]].from_state_dict(state["posterior"])
        inputs = {name: tuple(pair) for name, pair in state.get("input_means", {}).items()}
        return cls(inner, state["width"], state["linearized"], state.get("temperature", 1.0), inputs)


FAMILIES[ScaledPosterior.__name__] = ScaledPosterior
