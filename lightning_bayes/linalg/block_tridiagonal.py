"""The inverse of a curvature whose inverse is block-tridiagonal, Martens & Grosse 2015, section 4.3.

    F_ii = S_ii ⊗ A_ii    F_i,i+1 = S_i,i+1 ⊗ A_i,i+1            the blocks that are kept

    Ψ_i = F_i,i+1 F_i+1,i+1⁻¹    Λ_i⁻¹ = F_ii - Ψ_i F_i+1,i+1 Ψ_iᵀ    Λ_L⁻¹ = F_LL

    F̂⁻¹ = Ξᵀ diag(Λ_1, …, Λ_L) Ξ    Ξ_ii = I, Ξ_i,i+1 = -Ψ_i

F̂ has the blocks F_ii and F_i,i+1 exactly; the others follow. https://arxiv.org/abs/1503.05671.
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
    """F̂⁻¹, which acts on one matrix per layer; build it with `of`.

    Attributes:
        conditional: Λ_i of every layer.
        regression: Ψ_i of every layer but the last.
    """

    conditional: tuple[DifferenceInverse, ...]
    regression: tuple[KroneckerProduct, ...]

    @classmethod
    def of(
        cls, diagonal: Sequence[KroneckerProduct], off_diagonal: Sequence[KroneckerProduct], names: Sequence[str] = ()
    ) -> BlockTridiagonalInverse:
        """Factorise; damping is added to the diagonal blocks before, which keeps every Λ_i positive definite.

        Args:
            diagonal: S_ii ⊗ A_ii of every layer, symmetric positive definite factors.
            off_diagonal: S_i,i+1 ⊗ A_i,i+1 of every pair of neighbours.
            names: Names of the layers in error messages.

        Returns:
            F̂⁻¹.

        Raises:
            ShapeError: If there is not one block for every pair of neighbours.
        """
        if len(off_diagonal) != len(diagonal) - 1:
            raise ShapeError(
                f"{len(diagonal)} layers have {len(diagonal) - 1} pairs of neighbours, but {len(off_diagonal)} blocks "
                "between layers were given."
            )
        names = [f"layer {names[i] if names else i}" for i in range(len(diagonal))]
        nexts = zip(off_diagonal, diagonal[1:], names[1:], strict=True)
        regression = tuple(cross.compose(block.inverse(name)) for cross, block, name in nexts)
        explained = [psi.compose(cross.transpose()) for psi, cross in zip(regression, off_diagonal, strict=True)]
        return cls(
            tuple(map(DifferenceInverse.of, diagonal, [*explained, None], names)),
            regression,
        )

    def matvec(self, x: Sequence[Tensor]) -> list[Tensor]:
        """F̂⁻¹ x for one matrix per layer."""
        whitened = list(x)  # Ξ x
        for i, psi in enumerate(self.regression):
            whitened[i] = x[i] - psi.matvec(x[i + 1])
        return self._correlated([block.matvec(here) for block, here in zip(self.conditional, whitened, strict=True)])

    def root(self, noise: Sequence[Tensor]) -> list[Tensor]:
        """T noise with T Tᵀ = F̂⁻¹, for sampling."""
        return self._correlated([block.root(here) for block, here in zip(self.conditional, noise, strict=True)])

    def inverse_root(self, x: Sequence[Tensor]) -> list[Tensor]:
        """T⁻¹ x, the inverse of `root`."""
        innovations = [x[0]]
        for psi, here in zip(self.regression, x[1:], strict=True):
            innovations.append(here + psi.transpose().matvec(innovations[-1]))
        return [block.inverse_root(y) for block, y in zip(self.conditional, innovations, strict=True)]

    def log_det(self) -> Tensor:
        """Log det F̂ (not of its inverse): Ξ has unit determinant."""
        return torch.stack([block.log_det() for block in self.conditional]).sum(0)

    def diagonal(self) -> list[Tensor]:
        """The diagonal of F̂⁻¹, one matrix per layer: that of Λ_i + Ψ_i-1ᵀ Λ_i-1 Ψ_i-1."""
        own = [block.basis.squared_rows(1 / block.spectrum) for block in self.conditional]
        for i, psi in enumerate(self.regression):
            before = self.conditional[i]
            own[i + 1] = own[i + 1] + psi.transpose().compose(before.basis).squared_rows(1 / before.spectrum)
        return own

    def _correlated(self, innovations: Sequence[Tensor]) -> list[Tensor]:
        """Ξᵀ y: x_1 = y_1, x_i+1 = y_i+1 - Ψ_iᵀ y_i."""
        correlated = list(innovations)
        for i, psi in enumerate(self.regression):
            correlated[i + 1] = innovations[i + 1] - psi.transpose().matvec(innovations[i])
        return correlated
