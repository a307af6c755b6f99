"""The inverse of a curvature whose inverse is block-tridiagonal, Martens & Grosse 2015, section 4.3.

    F_ii = S_ii ⊗ A_ii    F_i,i+1 = S_i,i+1 ⊗ A_i,i+1            the given blocks

    Ψ_i = F_i,i+1 F_i+1,i+1⁻¹    Λ_i⁻¹ = F_ii - Ψ_i F_i+1,i+1 Ψ_iᵀ    Λ_L⁻¹ = F_LL

    F̂⁻¹ = Ξᵀ diag(Λ_1, …, Λ_L) Ξ    Ξ_ii = I, Ξ_i,i+1 = -Ψ_i

F̂ matches F in the blocks F_ii and F_i,i+1; they determine all other blocks. https://arxiv.org/abs/1503.05671.

(A ⊗ B - C ⊗ D)⁻¹ is not formed (Martens & Grosse 2015, appendix B). With A = L Lᵀ, L⁻¹ C L⁻ᵀ = E₁ diag(s₁) E₁ᵀ and
K₁ = L⁻ᵀ E₁, both matrices are diagonal in K₁, and likewise in K₂ for B and D:

    K₁ᵀ A K₁ = I        K₁ᵀ C K₁ = diag(s₁)

    (A ⊗ B - C ⊗ D)⁻¹ = (K₁ ⊗ K₂) diag(1 / (1 - s₁ s₂ᵀ)) (K₁ ⊗ K₂)ᵀ
    T                 = (K₁ ⊗ K₂) diag(1 / √(1 - s₁ s₂ᵀ)) (E₁ ⊗ E₂)ᵀ        T Tᵀ = (A ⊗ B - C ⊗ D)⁻¹

T ends in (E₁ ⊗ E₂)ᵀ because the signs of eigenvectors are arbitrary: otherwise rounding could flip a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import ShapeError
from lightning_bayes.linalg.factors import cholesky
from lightning_bayes.linalg.kronecker import KroneckerProduct


class BlockTridiagonalInverse(NamedTuple):
    """F̂⁻¹, which acts on one matrix per layer; use `of` to construct it.

    Attributes:
        conditional: Λ_i of each layer.
        regression: Ψ_i of each layer except the last.
    """

    conditional: tuple[DifferenceInverse, ...]
    regression: tuple[KroneckerProduct, ...]

    @classmethod
    def of(
        cls, diagonal: Sequence[KroneckerProduct], off_diagonal: Sequence[KroneckerProduct], names: Sequence[str] = ()
    ) -> BlockTridiagonalInverse:
        """Factorise S_ii ⊗ A_ii and S_i,i+1 ⊗ A_i,i+1."""
        if len(off_diagonal) != len(diagonal) - 1:
            raise ShapeError(
                f"{len(diagonal)} layers have {len(diagonal) - 1} pairs of neighbours, but got {len(off_diagonal)} blocks "
                "between layers."
            )
        names = [f"layer {names[i] if names else i}" for i in range(len(diagonal))]
        neighbours = zip(off_diagonal, diagonal[1:], names[1:], strict=True)
        regression = tuple(cross.compose(block.inverse(name)) for cross, block, name in neighbours)
        explained = [psi.compose(cross.transpose()) for psi, cross in zip(regression, off_diagonal, strict=True)]
        return cls(tuple(map(DifferenceInverse.of, diagonal, [*explained, None], names)), regression)

    def matvec(self, x: Sequence[Tensor]) -> list[Tensor]:
        """F̂⁻¹ x for one matrix per layer."""
        whitened = list(x)  # Ξ x
        for i, psi in enumerate(self.regression):
            whitened[i] = x[i] - psi.matvec(x[i + 1])
        return self._correlated([block.matvec(y) for block, y in zip(self.conditional, whitened, strict=True)])

    def root(self, noise: Sequence[Tensor]) -> list[Tensor]:
        """T noise with T Tᵀ = F̂⁻¹, for sampling."""
        return self._correlated([block.root(y) for block, y in zip(self.conditional, noise, strict=True)])

    def inverse_root(self, x: Sequence[Tensor]) -> list[Tensor]:
        """T⁻¹ x, the inverse of `root`."""
        innovations = [x[0]]
        for psi, matrix in zip(self.regression, x[1:], strict=True):
            innovations.append(matrix + psi.transpose().matvec(innovations[-1]))
        return [block.inverse_root(y) for block, y in zip(self.conditional, innovations, strict=True)]

    def log_det(self) -> Tensor:
        """Log det F̂ (not F̂⁻¹); Ξ has unit determinant."""
        return torch.stack([block.log_det() for block in self.conditional]).sum(0)

    def diagonal(self) -> list[Tensor]:
        """The diagonal of F̂⁻¹, diag(Λ_i + Ψ_i-1ᵀ Λ_i-1 Ψ_i-1), one matrix per layer."""
        diagonals = [block.basis.squared_rows(1 / block.spectrum) for block in self.conditional]
        for i, (psi, block) in enumerate(zip(self.regression, self.conditional[:-1], strict=True)):
            explained = psi.transpose().compose(block.basis).squared_rows(1 / block.spectrum)
            diagonals[i + 1] = diagonals[i + 1] + explained
        return diagonals

    def _correlated(self, innovations: Sequence[Tensor]) -> list[Tensor]:
        """Ξᵀ y: x_1 = y_1, x_i+1 = y_i+1 - Ψ_iᵀ y_i."""
        correlated = list(innovations)
        for i, psi in enumerate(self.regression):
            correlated[i + 1] = innovations[i + 1] - psi.transpose().matvec(innovations[i])
        return correlated


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
