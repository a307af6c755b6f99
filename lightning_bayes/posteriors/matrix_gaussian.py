"""The matrix-variate Gaussian posterior of Noisy K-FAC, Zhang et al. 2018, eq. 13, https://arxiv.org/abs/1712.02390.

Each layer's matrix W (bias as last column, see `layer_matrix`) has a precision that is a Kronecker product; layers are
independent of each other, and everything else (norms, embeddings) is mean-field:

    q(W) = N(vec W; vec M, (L ⊗ R)⁻¹)        L ⊗ R = (Ñ/τ) (S + √δ̃/π I) ⊗ (A + π√δ̃ I)        vec: row by row

The second equation is `kronecker_precision`; the scale sits in L.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict, cut
from lightning_bayes.posteriors.layer_matrix import layer_matrix, layer_tensors


def kronecker_precision(
    curvature: KroneckerProduct, scale: float | Tensor, damping: float | Tensor
) -> KroneckerProduct:
    """Posterior precision of a layer's matrix.

    Args:
        curvature: S ⊗ A of the mean negative log-likelihood.
        scale: Ñ/τ.
        damping: δ̃ + γ: the prior, and the damping where it is part of the noise.

    Returns:
        (Ñ/τ) (S + √(δ̃+γ)/π I) ⊗ (A + π√(δ̃+γ) I): with zero curvature and δ̃ = τδ/Ñ, the prior's precision δ.
    """
    damped = pi_damped(curvature, damping)
    return KroneckerProduct(damped.left * scale, damped.right)


@final
@dataclass(frozen=True, repr=False)
class MatrixGaussian(AbstractPosterior):
    """A Gaussian posterior with a Kronecker-factored precision for each layer's matrix.

    Attributes:
        mean: μ by parameter name.
        factors: (L, R) by the name of the layer's weight, ``[out, out]`` and ``[K, K]``; with groups
            ``[groups, out / groups, out / groups]`` and ``[groups, K, K]``.
        biases: Name of the bias that is the matrix's last column, by the name of the weight.
        precision: 1/Σ of every other weight by parameter name, shaped like the mean.
        prior_precision: δ by parameter name.
        num_data: N, the number of training examples the posterior has seen.
        constants: Parameters without noise and buffers by name: what else a prediction needs.
        prior_mean: μ₀ by parameter name, for parameters whose prior is not centred at zero.

    Example:
        >>> q = MatrixGaussian(
        ...     {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)},
        ...     {"weight": (4 * torch.eye(2), torch.eye(4))},
        ...     {"weight": "bias"},
        ...     {},
        ...     {"weight": 1.0, "bias": 1.0},
        ...     num_data=10,
        ... )
        >>> q.variance()["bias"], q.sample()["weight"].shape
        (tensor([0.2500, 0.2500]), torch.Size([2, 3]))
    """

    mean: TensorDict
    factors: dict[str, tuple[Tensor, Tensor]]
    biases: dict[str, str]
    precision: TensorDict
    prior_precision: dict[str, float]
    num_data: float
    constants: TensorDict = field(default_factory=dict)
    prior_mean: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the parts fit.

        Raises:
            PosteriorError: If they do not.
        """
        wrong = [name for name, mean in self.precision.items() if mean.shape != self._mean_shape(name)]
        wrong += [name for name in self.factors if not self._factors_fit(name)]
        wrong += [name for name in self.mean if name not in self.prior_precision]
        covered = [*self.precision, *self.factors, *self.biases.values()]
        wrong += [name for name in self.mean if covered.count(name) != 1]
        if wrong:
            raise PosteriorError(
                f"Mean, factors, precision and prior do not fit for {', '.join(dict.fromkeys(wrong))}."
            )

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + T ε, with T the product of the factors' inverse roots; see `AbstractPosterior.transform`."""
        weights = {name: self.mean[name] + noise[name] * p.rsqrt() for name, p in self.precision.items()}
        for name, root in self._roots.items():
            self._write(weights, name, root.upper_matvec(self._matrix(noise, name)))
        return {name: weights[name] if name in self.precision else m + weights[name] for name, m in self.mean.items()}

    def variance(self) -> TensorDict:
        """Variances, diag Σ, by parameter name."""
        variances = {name: precision.reciprocal() for name, precision in self.precision.items()}
        for name, root in self._roots.items():
            self._write(variances, name, root.squared_rows())
        return variances

    def log_det_precision(self) -> Tensor:
        """Log det Σ⁻¹, the sum over layers and other weights."""
        terms = [precision.log().sum() for precision in self.precision.values()]
        # Roots are triangular, so their determinants are products of diagonals.
        terms += [-2 * root.diagonal().log().sum() for root in self._roots.values()]
        return torch.stack(terms).sum()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ), the sum over layers and other weights."""
        away = {name: weights[name] - mean for name, mean in self.mean.items()}
        terms = [(p * away[name].square()).sum() for name, p in self.precision.items()]
        for name, factors in self.factors.items():
            matrix = self._matrix(away, name)
            terms.append((matrix * KroneckerProduct(*factors).matvec(matrix)).sum())
        return torch.stack(terms).sum()

    def select(self, prefix: str) -> MatrixGaussian:
        """The posterior of a submodule; see `AbstractPosterior.select`."""
        self._require_selected(prefix)
        biases = {name: bias[len(prefix) :] for name, bias in cut(self.biases, prefix).items()}
        return MatrixGaussian(
            cut(self.mean, prefix),
            cut(self.factors, prefix),
            biases,
            cut(self.precision, prefix),
            cut(self.prior_precision, prefix),
            self.num_data,
            cut(self.constants, prefix),
            cut(self.prior_mean, prefix),
        )

    @cached_property
    def _roots(self) -> dict[str, KroneckerProduct]:
        return {
            name: KroneckerProduct(*factors).inverse_root(f"precision of {name}")
            for name, factors in self.factors.items()
        }

    def _matrix(self, values: TensorDict, name: str) -> Tensor:
        left = self.factors[name][0]
        bias = values[self.biases[name]] if name in self.biases else None
        return layer_matrix(values[name], bias, len(left) if left.dim() == 3 else 1)

    def _write(self, values: TensorDict, name: str, matrix: Tensor) -> None:
        weight, bias = layer_tensors(matrix, self.mean[name].shape, name in self.biases)
        values[name] = weight
        if bias is not None:
            values[self.biases[name]] = bias

    def _mean_shape(self, name: str) -> torch.Size | None:
        return self.mean[name].shape if name in self.mean else None

    def _factors_fit(self, name: str) -> bool:
        if name not in self.mean or self.biases.get(name, name) not in self.mean:
            return False
        left, right = self.factors[name]
        if left.dim() == 3 and len(self.mean[name]) % len(left):
            return False
        rows, columns = self._matrix(self.mean, name).shape[-2:]
        return left.shape[-2:] == (rows, rows) and right.shape == (*left.shape[:-2], columns, columns)
