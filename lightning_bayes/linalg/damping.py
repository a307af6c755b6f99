"""Damping of a Kronecker product that keeps it a Kronecker product, Martens & Grosse 2015, section 6.3.

    S ⊗ A + γ I  ≈  (S + √γ/π I) ⊗ (A + π√γ I)        π = √( (tr A / dim A) / (tr S / dim S) )

https://arxiv.org/abs/1503.05671. The right-hand side is larger by √γ (S π ⊗ I + I ⊗ A / π). This π gives both excess terms
the same trace norm, and makes the result independent of how a scale is split between A and S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.linalg.cholesky import add_to_diagonal
from lightning_bayes.linalg.kronecker import KroneckerProduct

MAX_RATIO = 1e6


def pi_ratio(product: KroneckerProduct) -> Tensor:
    """π of a product S ⊗ A of positive semi-definite factors.

    Args:
        product: S and A, ``[..., n, n]``.

    Returns:
        π, ``[...]``, within [1e-6, 1e6]. If one factor vanishes (a dead layer), the bounds make the damped product
        nearly γ I. If both vanish, π = 1.
    """
    left = product.left.diagonal(dim1=-2, dim2=-1).mean(-1)
    right = product.right.diagonal(dim1=-2, dim2=-1).mean(-1)
    ratio = (right.clamp_min(0) / left.clamp_min(0)).sqrt()
    return torch.where((left <= 0) & (right <= 0), 1.0, ratio.clamp(1 / MAX_RATIO, MAX_RATIO))


def pi_damped(product: KroneckerProduct, damping: float | Tensor) -> KroneckerProduct:
    """(S + √γ/π I) ⊗ (A + π√γ I).

    Args:
        product: S and A, ``[..., n, n]``.
        damping: γ ≥ 0, a number or ``[...]``.

    Returns:
        The damped factors.

    Example:
        >>> damped = pi_damped(KroneckerProduct(4 * torch.eye(2), torch.eye(3)), 0.01)
        >>> damped.left.diagonal(), damped.right.diagonal()
        (tensor([4.2000, 4.2000]), tensor([1.0500, 1.0500, 1.0500]))
    """
    ratio = pi_ratio(product)
    root = torch.as_tensor(damping, dtype=ratio.dtype, device=ratio.device).sqrt()
    return KroneckerProduct(add_to_diagonal(product.left, root / ratio), add_to_diagonal(product.right, root * ratio))
