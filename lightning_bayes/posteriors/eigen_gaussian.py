"""The Gaussian posterior of a Kronecker-factored Laplace approximation, in the eigenbasis of its factors.

The curvature of a weight is S ⊗ A with S = U_S diag(λ_S) U_Sᵀ and A = U_A diag(λ_A) U_Aᵀ. In this basis the prior is added
exactly, without damping the factors (Ritter et al. 2018, https://openreview.net/forum?id=Skdvd2xAZ):

    Σ⁻¹ = S ⊗ A + δ I = (U_S ⊗ U_A) diag(D) (U_S ⊗ U_A)ᵀ        D_jk = λ_S,j λ_A,k + δ

Parameters are independent of each other. A bias has no A. Parameters without factors are mean-field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict, as_rows, scaled_squares


@final
@dataclass(frozen=True, repr=False)
class EigenGaussian(AbstractPosterior):
    """A Gaussian posterior whose precision is diagonal in a Kronecker basis of each parameter.

    The other fields are documented in `AbstractPosterior`.

    Attributes:
        bases: (U_S, U_A) by weight name, ``[out, out]`` and ``[K, K]`` for a weight with K elements per output; (U_S,) by
            bias name. A grouped convolution adds a leading dimension: ``[groups, out / groups, out / groups]``.
        eigenvalues: D by the same names, ``[out, K]`` or ``[groups, out / groups, K]``; K = 1 for a bias.
        precision: 1/Σ of every other parameter by name, shaped like the mean.
    """

    mean: TensorDict
    bases: dict[str, tuple[Tensor, ...]]
    eigenvalues: TensorDict
    precision: TensorDict
    prior_precision: dict[str, float]
    num_data: float
    constants: TensorDict = field(default_factory=dict)
    prior_mean: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `PosteriorError` if names or shapes do not match."""
        wrong = [name for name in self.mean if (name in self.bases) == (name in self.precision)]
        wrong += [name for name in {*self.bases, *self.eigenvalues, *self.precision} if name not in self.mean]
        wrong += [name for name in self.bases if name in self.mean and not self._fits(name)]
        wrong += [n for n, value in self.precision.items() if n in self.mean and value.shape != self.mean[n].shape]
        self._require_match("Mean, bases, eigenvalues, precision and prior", wrong)

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + (U_S ⊗ U_A) D^(-1/2) ε."""
        offsets = {
            name: _rotated(self.bases.get(name, ()), self._matrix(name, noise[name]) * d.rsqrt())
            for name, d in self._spectra.items()
        }
        return {name: mean + offsets[name].view_as(mean) for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """Variances, diag Σ, by parameter name."""
        variances = {
            name: _rotated([basis.square() for basis in self.bases.get(name, ())], d.reciprocal())
            for name, d in self._spectra.items()
        }
        return {name: variances[name].view_as(mean) for name, mean in self.mean.items()}

    def log_det_precision(self) -> Tensor:
        """Σ log D over all parameters."""
        return torch.stack([d.log().sum() for d in self._spectra.values()]).sum()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ), summed over parameters."""
        offsets = {name: self._to_basis(name, weights[name] - mean) for name, mean in self.mean.items()}
        return torch.stack([(d * offsets[name].square()).sum() for name, d in self._spectra.items()]).sum()

    def blocks(self) -> list[list[str]]:
        """One block per parameter."""
        return [[name] for name in self.mean]

    def variance_along(self, directions: TensorDict) -> Tensor:
        """Σ (U_Sᵀ d U_A)²/D."""
        terms = [self._to_basis(name, d).square() / self._spectra[name] for name, d in directions.items()]
        return torch.stack([as_rows(term).sum(1) for term in terms]).sum(0)

    def variance_along_rows(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Σ_jk (Σ_t (U_Sᵀ left_t)_j (U_Aᵀ right_t)_k)²/D_jk."""
        if bases := self.bases.get(name):
            left, right = left @ bases[0], right @ bases[1]
        return scaled_squares(left, right, self._spectra[name].flatten(1))

    @cached_property
    def _spectra(self) -> TensorDict:
        """D of every parameter by name. Mean-field parameters have no bases, and their precision is D."""
        return {**self.precision, **self.eigenvalues}

    def _matrix(self, name: str, values: Tensor) -> Tensor:
        """Reshape values of a parameter, ``[…, *shape]``, to its matrix, ``[…, *D.shape]``."""
        leading = values.shape[: values.dim() - self.mean[name].dim()]
        return values.reshape(*leading, *self._spectra[name].shape)

    def _to_basis(self, name: str, values: Tensor) -> Tensor:
        return _rotated([u.mT for u in self.bases.get(name, ())], self._matrix(name, values))

    def _fits(self, name: str) -> bool:
        values = self.eigenvalues.get(name, self.mean[name].new_zeros(0))
        sides = values.shape[-2:] if len(self.bases[name]) == 2 else values.shape[-2:-1]
        sizes = [basis.shape[-1] for basis in self.bases[name]]
        return values.numel() == self.mean[name].numel() and list(sides) == sizes


def _rotated(bases: Sequence[Tensor], matrix: Tensor) -> Tensor:
    """L M Rᵀ, L M with a single basis, or M without bases."""
    if bases:
        matrix = bases[0] @ matrix
    return matrix @ bases[1].mT if len(bases) == 2 else matrix
