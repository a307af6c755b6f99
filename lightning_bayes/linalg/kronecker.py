"""The Kronecker product of two matrices without forming it, and damping that keeps it a Kronecker product.

    (L ⊗ R) vec(X) = vec(L X Rᵀ)                   where vec flattens a matrix row by row, as ``X.flatten()`` does

    S ⊗ A + γ I  ≈  (S + √γ/π I) ⊗ (A + π√γ I)     π = √( (tr A / dim A) / (tr S / dim S) )

The second is Martens & Grosse 2015, section 6.3 (https://arxiv.org/abs/1503.05671). The right-hand side is larger by
√γ (S π ⊗ I + I ⊗ A / π). This π gives both excess terms the same trace norm, and makes the result independent of how a
scale is split between A and S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.linalg.factors import add_to_diagonal, cholesky, inverse, inverse_root, upper_matmul

MAX_RATIO = 1e6  # of π


class KroneckerProduct(NamedTuple):
    """left ⊗ right, which acts on matrices ``[..., m, n]`` flattened row by row.

    Attributes:
        left: L, ``[..., p, m]``. In a layer's curvature this is S, from the output gradients.
        right: R, ``[..., q, n]``. In a layer's curvature this is A, from the inputs.
    """

    left: Tensor
    right: Tensor

    def matvec(self, x: Tensor) -> Tensor:
        """(L ⊗ R) vec(X) as a matrix, L X Rᵀ; ``x [..., m, n]`` to ``[..., p, q]``."""
        return self.left @ x @ self.right.mT

    def upper_matvec(self, x: Tensor) -> Tensor:
        """`matvec` for upper-triangular factors, such as those of `inverse_root`; skips most zeros."""
        return upper_matmul(self.left, upper_matmul(self.right, x.mT).mT)

    def transpose(self) -> KroneckerProduct:
        """(L ⊗ R)ᵀ = Lᵀ ⊗ Rᵀ."""
        return KroneckerProduct(self.left.mT, self.right.mT)

    def compose(self, other: KroneckerProduct) -> KroneckerProduct:
        """(L ⊗ R)(L' ⊗ R') = L L' ⊗ R R'."""
        return KroneckerProduct(self.left @ other.left, self.right @ other.right)

    def inverse_root(self, name: str = "Kronecker product") -> KroneckerProduct:
        """T = T_L ⊗ T_R, upper triangular, with T Tᵀ = (L ⊗ R)⁻¹; for symmetric positive definite factors."""
        return KroneckerProduct(*self._of_factors(inverse_root, name))

    def inverse(self, name: str = "Kronecker product") -> KroneckerProduct:
        """(L ⊗ R)⁻¹ = L⁻¹ ⊗ R⁻¹, for symmetric positive definite factors; `name` is for error messages."""
        return KroneckerProduct(*self._of_factors(inverse, name))

    def log_det(self, name: str = "Kronecker product") -> Tensor:
        """Log det (L ⊗ R) = n log det L + m log det R, ``[...]``; `name` is for error messages."""
        left, right = self._of_factors(_log_det, name)
        return self.right.shape[-1] * left + self.left.shape[-1] * right

    def _of_factors(self, function: Callable[[Tensor, str], Tensor], name: str) -> tuple[Tensor, Tensor]:
        """A function of each factor and of its name for error messages."""
        return function(self.left, f"left factor S of {name}"), function(self.right, f"right factor A of {name}")

    def trace(self) -> Tensor:
        """Tr (L ⊗ R) = tr L · tr R, ``[...]``."""
        return _diagonal(self.left).sum(-1) * _diagonal(self.right).sum(-1)

    def diagonal(self) -> Tensor:
        """The diagonal as a matrix: diag(L) diag(R)ᵀ, ``[..., m, n]``."""
        return _diagonal(self.left)[..., :, None] * _diagonal(self.right)[..., None, :]

    def squared_rows(self, weights: Tensor | float = 1.0) -> Tensor:
        """The diagonal of (L ⊗ R) diag(weights) (L ⊗ R)ᵀ as a matrix; `weights` is ``[..., m, n]`` or one number."""
        shape = (*self.left.shape[:-2], self.left.shape[-1], self.right.shape[-1])
        weights = torch.as_tensor(weights, dtype=self.left.dtype, device=self.left.device).expand(shape)
        return self.left.square() @ weights @ self.right.square().mT

    def dense(self) -> Tensor:
        """The product as a dense matrix ``[..., p·q, m·n]``; for small factors."""
        blocks = self.left[..., :, None, :, None] * self.right[..., None, :, None, :]
        return blocks.flatten(-4, -3).flatten(-2)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _log_det(matrix: Tensor, name: str) -> Tensor:
    return 2 * _diagonal(cholesky(matrix, name)).log().sum(-1)


def pi_ratio(product: KroneckerProduct) -> Tensor:
    """π of S ⊗ A, ``[...]``, within [1e-6, 1e6]; the bounds make the damped product of a dead layer nearly γ I."""
    left = product.left.diagonal(dim1=-2, dim2=-1).mean(-1)
    right = product.right.diagonal(dim1=-2, dim2=-1).mean(-1)
    ratio = (right.clamp_min(0) / left.clamp_min(0)).sqrt()
    return torch.where((left <= 0) & (right <= 0), 1.0, ratio.clamp(1 / MAX_RATIO, MAX_RATIO))


def pi_damped(product: KroneckerProduct, damping: float | Tensor) -> KroneckerProduct:
    """(S + √γ/π I) ⊗ (A + π√γ I) for a damping γ ≥ 0, a number or ``[...]``."""
    ratio = pi_ratio(product)
    root = torch.as_tensor(damping, dtype=ratio.dtype, device=ratio.device).sqrt()
    return KroneckerProduct(add_to_diagonal(product.left, root / ratio), add_to_diagonal(product.right, root * ratio))
