"""Cholesky factors of matrices that are positive definite up to rounding.

A running average of outer products is positive semi-definite. Rounding can make it indefinite, and a dead unit without
damping makes it singular. `cholesky` then adds jitter to the diagonal: each matrix of a batch gets the first value of
`JITTER_LADDER`, relative to the mean of its diagonal, with which it factorises. If all values fail, an error is raised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError
from lightning_bayes.linalg.triangular import upper_inverse

JITTER_LADDER = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)  # times the mean of the diagonal


def cholesky(matrix: Tensor, name: str = "matrix") -> Tensor:
    """Lower-triangular L with L Lᵀ = matrix + jitter · I. Raises `NonFiniteError` for non-finite entries.

    Args:
        matrix: Symmetric positive definite up to rounding, ``[..., n, n]``.
        name: Name for error messages, such as ``"factor S of layer 'fc1'"``.

    Returns:
        L, ``[..., n, n]``.

    Raises:
        ShapeError: If the matrix is not square.
        NotPositiveDefiniteError: If the largest jitter does not suffice.

    Example:
        >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
        tensor([[2., 0.],
                [1., 1.]])
    """
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(f"The {name} has shape {list(matrix.shape)}; a Cholesky factor needs square matrices.")
    factor, failed = _attempt(matrix)
    if not failed.any():  # the common case, with a single factorisation
        return factor
    require_finite(
        matrix,
        name,
        "layer's input or output gradient; a smaller learning rate or float32 instead of half precision helps",
    )
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    jitter = torch.zeros_like(size)
    for rung in JITTER_LADDER[1:]:
        jitter = torch.where(failed, rung * size, jitter)
        factor, failed = _attempt(add_to_diagonal(matrix, jitter))
        if not failed.any():
            return factor
    raise NotPositiveDefiniteError(_not_positive_definite(matrix, name))


def inverse_root(matrix: Tensor, name: str = "matrix") -> Tensor:
    """R = L⁻ᵀ with R Rᵀ = matrix⁻¹: R ε with ε ~ N(0, I) has the covariance matrix⁻¹.

    Args:
        matrix: Symmetric positive definite, ``[..., n, n]``.
        name: Name for error messages.

    Returns:
        R, upper triangular, ``[..., n, n]``.
    """
    return upper_inverse(cholesky(matrix, name).mT)


def inverse(matrix: Tensor, name: str = "matrix") -> Tensor:
    """The inverse of a symmetric positive definite matrix from its Cholesky factor, including any jitter."""
    return torch.cholesky_inverse(cholesky(matrix, name))


def _attempt(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The factor, and whether the factorisation failed, ``[...]``."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor, (info > 0) | ~factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)  # √∞ counts as a success


def add_to_diagonal(matrix: Tensor, amount: Tensor | float) -> Tensor:
    """Matrix + amount · I, for ``[..., n, n]`` and a number or ``[...]``."""
    result = matrix.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(amount[..., None] if isinstance(amount, Tensor) else amount)
    return result


def require_finite(matrix: Tensor, name: str, suspect: str) -> None:
    """Raise `NonFiniteError` if an entry is not finite; `suspect` is the likely place of an overflow."""
    count = int((~matrix.isfinite()).sum())
    if count:
        raise NonFiniteError(
            f"The {name} {list(matrix.shape)} has {count} non-finite entries. Look for an overflow in the {suspect}."
        )


def _not_positive_definite(matrix: Tensor, name: str) -> str:
    eigenvalues = torch.linalg.eigvalsh(matrix.double())
    smallest, largest = float(eigenvalues.min()), float(eigenvalues.max())
    return (
        f"The {name} {list(matrix.shape)} has no Cholesky factor: its eigenvalues range from {smallest:.3g} "
        f"to {largest:.3g}, and adding {JITTER_LADDER[-1]:g} of its mean diagonal did not help. Use a larger damping or "
        "prior_precision; without either, a singular curvature has no inverse."
    )
