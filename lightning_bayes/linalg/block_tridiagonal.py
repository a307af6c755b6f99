"""The inverse of a curvature whose inverse is block-tridiagonal, Martens & Grosse 2015, section 4.3.

    F_ii = S_ii ⊗ A_ii    F_i,i+1 = S_i,i+1 ⊗ A_i,i+1            the given blocks

    Ψ_i = F_i,i+1 F_i+1,i+1⁻¹    Λ_i⁻¹ = F_ii - Ψ_i F_i+1,i+1 Ψ_iᵀ    Λ_L⁻¹ = F_LL

    F̂⁻¹ = Ξᵀ diag(Λ_1, …, Λ_L) Ξ    Ξ_ii = I, Ξ_i,i+1 = -Ψ_i

F̂ matches F in the blocks F_ii and F_i,i+1; they determine all other blocks. https://arxiv.org/abs/1503.05671.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import ShapeError
from lightning_bayes.linalg.difference import DifferenceInverse
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
