"""The matrix-variate Gaussian posterior of Noisy K-FAC, Zhang et al. 2018, eq. 13, https://arxiv.org/abs/1712.02390.

The precision of each layer's matrix W (bias as last column, see `layer_matrix`) is a Kronecker product. Layers are
independent of each other. All other parameters, such as norms and embeddings, are mean-field.

    q(W) = N(vec W; vec M, (L ⊗ R)⁻¹)        L ⊗ R = (Ñ/τ) (S + √δ̃/π I) ⊗ (A + π√δ̃ I)        vec: row by row

`kronecker_precision` implements the second equation; L includes the scale.

A layer's matrix is its weight and, as the last column, its bias: the weight of a constant input 1. Convolution kernels are
flattened. The groups of a convolution do not share weights and form a batch of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict


def kronecker_precision(
    curvature: KroneckerProduct, scale: float | Tensor, damping: float | Tensor
) -> KroneckerProduct:
    """(Ñ/τ) (S + √(δ̃+γ)/π I) ⊗ (A + π√(δ̃+γ) I); `scale` is Ñ/τ and `damping` is δ̃ + γ."""
    damped = pi_damped(curvature, damping)
    return KroneckerProduct(damped.left * scale, damped.right)


@final
@dataclass(frozen=True, repr=False)
class MatrixGaussian(AbstractPosterior):
    """A Gaussian posterior with a Kronecker-factored precision for each layer matrix.

    The other fields are documented in `AbstractPosterior`.

    Attributes:
        factors: (L, R) by weight name, ``[out, out]`` and ``[K, K]``; with groups ``[groups, out / groups, out / groups]``
            and ``[groups, K, K]``.
        biases: Name of the bias in the last column of the matrix, by weight name.
        precision: 1/Σ of every other parameter by name, shaped like the mean.
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
        """Raise `PosteriorError` if names or shapes do not match."""
        wrong = [n for n, value in self.precision.items() if n not in self.mean or value.shape != self.mean[n].shape]
        wrong += [name for name in self.factors if not self._factors_fit(name)]
        covered = [*self.precision, *self.factors, *self.biases.values()]
        wrong += [name for name in self.mean if covered.count(name) != 1]
        self._require_match("Mean, factors, precision and prior", wrong)

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + T ε, where T is the product of the factors' inverse roots."""
        offsets = {name: noise[name] * p.rsqrt() for name, p in self.precision.items()}
        for name, root in self._roots.items():
            self._set_layer(offsets, name, root.upper_matvec(self._matrix(noise, name)))
        return {name: mean + offsets[name] for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """Variances, diag Σ, by parameter name."""
        variances = {name: precision.reciprocal() for name, precision in self.precision.items()}
        for name, root in self._roots.items():
            self._set_layer(variances, name, root.squared_rows())
        return variances

    def log_det_precision(self) -> Tensor:
        """Log det Σ⁻¹, summed over layers and other parameters."""
        terms = [precision.log().sum() for precision in self.precision.values()]
        # The roots are triangular, so each determinant is the product of the diagonal.
        terms += [-2 * root.diagonal().log().sum() for root in self._roots.values()]
        return torch.stack(terms).sum()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ), summed over layers and other parameters."""
        offsets = {name: weights[name] - mean for name, mean in self.mean.items()}
        terms = [(p * offsets[name].square()).sum() for name, p in self.precision.items()]
        for name, factors in self.factors.items():
            matrix = self._matrix(offsets, name)
            terms.append((matrix * KroneckerProduct(*factors).matvec(matrix)).sum())
        return torch.stack(terms).sum()

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

    def _set_layer(self, values: TensorDict, name: str, matrix: Tensor) -> None:
        set_layer(values, matrix, name, self.biases.get(name), self.mean[name].shape)

    def _factors_fit(self, name: str) -> bool:
        if name not in self.mean or self.biases.get(name, name) not in self.mean:
            return False
        left, right = self.factors[name]
        if left.dim() == 3 and len(self.mean[name]) % len(left):
            return False
        rows, columns = self._matrix(self.mean, name).shape[-2:]
        return left.shape[-2:] == (rows, rows) and right.shape == (*left.shape[:-2], columns, columns)


def layer_matrix(weight: Tensor, bias: Tensor | None = None, groups: int = 1) -> Tensor:
    """Weight and bias as ``[out, K]`` or ``[groups, out / groups, K]``; K = in / groups · |kernel|, + 1 with a bias."""
    matrix = weight.flatten(1)
    if bias is not None:
        matrix = torch.cat([matrix, bias[:, None]], 1)
    return matrix if groups == 1 else torch.unflatten(matrix, 0, (groups, -1))


def layer_tensors(matrix: Tensor, weight_shape: torch.Size, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Inverse of `layer_matrix`: the weight, and the bias or None."""
    rows = matrix.reshape(-1, matrix.shape[-1])
    if not has_bias:
        return rows.reshape(weight_shape), None
    return rows[:, :-1].reshape(weight_shape), rows[:, -1].clone()


def set_layer(values: dict[str, Tensor], matrix: Tensor, weight: str, bias: str | None, shape: torch.Size) -> None:
    """Split a layer matrix; store the weight of this shape, and the bias unless None, under their names."""
    values[weight], bias_values = layer_tensors(matrix, shape, bias is not None)
    if bias is not None and bias_values is not None:
        values[bias] = bias_values
