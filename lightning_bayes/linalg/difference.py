"""(A ⊗ B - C ⊗ D)⁻¹ without forming it, Martens & Grosse 2015, appendix B (https://arxiv.org/abs/1503.05671).

With A = L Lᵀ, L⁻¹ C L⁻ᵀ = E₁ diag(s₁) E₁ᵀ and K₁ = L⁻ᵀ E₁, both matrices are diagonal in K₁,

    K₁ᵀ A K₁ = I        K₁ᵀ C K₁ = diag(s₁)        and likewise K₂ for B and D

    (A ⊗ B - C ⊗ D)⁻¹ = (K₁ ⊗ K₂) diag(1 / (1 - s₁ s₂ᵀ)) (K₁ ⊗ K₂)ᵀ
    T                 = (K₁ ⊗ K₂) diag(1 / √(1 - s₁ s₂ᵀ)) (E₁ ⊗ E₂)ᵀ        T Tᵀ = (A ⊗ B - C ⊗ D)⁻¹

T ends in (E₁ ⊗ E₂)ᵀ because the signs of eigenvectors are arbitrary: otherwise rounding could flip a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.linalg.factors import cholesky
from lightning_bayes.linalg.kronecker import KroneckerProduct

SPECTRUM_FLOOR = 1e-4  # minimum of 1 - s₁ s₂, which vanishes by rounding or for perfectly correlated layers


class DifferenceInverse(NamedTuple):
    """The inverse of A ⊗ B - C ⊗ D in factored form; use `of` to construct it."""

    basis: KroneckerProduct
    rotation: KroneckerProduct
    inverse_basis: KroneckerProduct
    spectrum: Tensor

    @classmethod
    def of(
        cls, product: KroneckerProduct, subtracted: KroneckerProduct | None, name: str = "Kronecker product"
    ) -> DifferenceInverse:
        """Factorise A ⊗ B - C ⊗ D, which must be positive definite; `subtracted` is None for zero."""
        left_subtracted, right_subtracted = (None, None) if subtracted is None else subtracted
        left = _diagonalised(product.left, left_subtracted, f"left factor S of {name}")
        right = _diagonalised(product.right, right_subtracted, f"right factor A of {name}")
        spectrum = 1 - left.values[..., :, None] * right.values[..., None, :]
        return cls(
            KroneckerProduct(left.basis, right.basis),
            KroneckerProduct(left.rotation, right.rotation),
            KroneckerProduct(left.inverse_basis, right.inverse_basis),
            spectrum.clamp_min(SPECTRUM_FLOOR),
        )

    def matvec(self, x: Tensor) -> Tensor:
        """(A ⊗ B - C ⊗ D)⁻¹ vec(X) as a matrix ``[..., m, n]``."""
        return self.basis.matvec(self.basis.transpose().matvec(x) / self.spectrum)

    def root(self, noise: Tensor) -> Tensor:
        """T vec(noise) with T Tᵀ = (A ⊗ B - C ⊗ D)⁻¹, for sampling."""
        return self.basis.matvec(self.rotation.transpose().matvec(noise) * self.spectrum.rsqrt())

    def inverse_root(self, x: Tensor) -> Tensor:
        """T⁻¹ vec(X), the inverse of `root`."""
        return self.rotation.matvec(self.inverse_basis.matvec(x) * self.spectrum.sqrt())

    def log_det(self) -> Tensor:
        """Log det of A ⊗ B - C ⊗ D (not of the inverse), ``[...]``."""
        rows, columns = self.spectrum.shape[-2:]
        left: Tensor = torch.linalg.slogdet(self.inverse_basis.left).logabsdet
        right: Tensor = torch.linalg.slogdet(self.inverse_basis.right).logabsdet
        return 2 * (columns * left + rows * right) + self.spectrum.log().sum((-2, -1))


class _Diagonalisation(NamedTuple):
    basis: Tensor  # K
    rotation: Tensor  # E
    inverse_basis: Tensor  # K⁻¹
    values: Tensor  # s


def _diagonalised(matrix: Tensor, other: Tensor | None, name: str) -> _Diagonalisation:
    """Diagonalise both matrices: Kᵀ matrix K = I and Kᵀ other K = diag(s); `other` is zero if None."""
    factor = cholesky(matrix, name)
    if other is None:
        vectors, values = torch.eye(matrix.shape[-1]).to(matrix).expand_as(matrix), torch.zeros_like(matrix[..., 0])
    else:
        half = torch.linalg.solve_triangular(factor, other, upper=False)
        whitened = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        values, vectors = torch.linalg.eigh((whitened + whitened.mT) / 2)
    basis = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)
    return _Diagonalisation(basis, vectors, vectors.mT @ factor.mT, values)
