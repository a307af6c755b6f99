"""Cholesky factors of matrices that are positive definite up to rounding.

A running average of outer products is positive semi-definite; rounding, or a dead unit without damping, can make it
indefinite. `JITTER_LADDER` states the values that are then added to the diagonal, in units of its mean: each matrix of a
batch takes the first one with which it factorises, and a matrix for which all fail is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError

JITTER_LADDER = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)  # times the mean of the diagonal
SOLVED_AT_ONCE = 128  # sides of triangular matrices that are inverted by a solve


def cholesky(matrix: Tensor, name: str = "matrix") -> Tensor:
    """Lower-triangular L with L Lᵀ = matrix + jitter · I; entries that are not finite are a `NonFiniteError`.

    Args:
        matrix: Symmetric positive definite up to rounding, ``[..., n, n]``.
        name: Its name in error messages, such as ``"factor S of layer 'fc1'"``.

    Returns:
        L, ``[..., n, n]``.

    Raises:
        ShapeError: If the matrix is not square.
        NotPositiveDefiniteError: If the last rung of `JITTER_LADDER` does not suffice.

    Example:
        >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
        tensor([[2., 0.],
                [1., 1.]])
    """
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(f"The {name} has shape {list(matrix.shape)}; a Cholesky factor needs square matrices.")
    factor, failed = _attempt(matrix)
    if not failed.any():  # the usual case costs one factorisation
        return factor
    _require_finite(matrix, name)
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    jitter = torch.zeros_like(size)
    for rung in JITTER_LADDER[1:]:
        jitter = torch.where(failed, rung * size, jitter)
        factor, failed = _attempt(matrix + _times_identity(jitter, matrix))
        if not failed.any():
            return factor
    raise NotPositiveDefiniteError(_not_positive_definite(matrix, name))


def inverse_root(matrix: Tensor, name: str = "matrix") -> Tensor:
    """R = L⁻ᵀ with R Rᵀ = matrix⁻¹: R ε with ε ~ N(0, I) has the covariance matrix⁻¹.

    Args:
        matrix: Symmetric positive definite, ``[..., n, n]``.
        name: Its name in error messages.

    Returns:
        R, upper triangular, ``[..., n, n]``.
    """
    return _upper_inverse(cholesky(matrix, name).mT)


def _upper_inverse(upper: Tensor) -> Tensor:
    """U⁻¹ by halves: of U = [[A, B], [0, D]] it is [[A⁻¹, -A⁻¹ B D⁻¹], [0, D⁻¹]]."""
    # A triangular solve for the identity does not know of its zeros, and takes half as many multiplications again.
    size = upper.shape[-1]
    if size <= SOLVED_AT_ONCE:
        identity = torch.eye(size, dtype=upper.dtype, device=upper.device).expand_as(upper)
        found: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
        return found
    half, result = size // 2, torch.zeros_like(upper, memory_format=torch.contiguous_format)
    first, second = _upper_inverse(upper[..., :half, :half]), _upper_inverse(upper[..., half:, half:])
    result[..., :half, :half], result[..., half:, half:] = first, second
    result[..., :half, half:] = first @ (upper[..., :half, half:] @ second).neg_()
    return result


def inverse(matrix: Tensor, name: str = "matrix") -> Tensor:
    """matrix⁻¹, from its Cholesky factor and with its jitter.

    Args:
        matrix: Symmetric positive definite, ``[..., n, n]``.
        name: Its name in error messages.

    Returns:
        The inverse.
    """
    return torch.cholesky_inverse(cholesky(matrix, name))


def _attempt(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor and whether it does not exist, ``[...]``."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor, (info > 0) | ~factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)  # √∞ counts as a success


def _times_identity(values: Tensor, like: Tensor) -> Tensor:
    identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return values[..., None, None] * identity


def _require_finite(matrix: Tensor, name: str) -> None:
    wrong = int((~matrix.isfinite()).sum())
    if wrong:
        raise NonFiniteError(
            f"The {name} {list(matrix.shape)} has {wrong} entries that are not finite. Look for an overflow in the "
            "layer's input or output gradient; a smaller learning rate or float32 instead of half precision helps."
        )


def _not_positive_definite(matrix: Tensor, name: str) -> str:
    eigenvalues = torch.linalg.eigvalsh(matrix.double())
    least, largest = float(eigenvalues.min()), float(eigenvalues.max())
    return (
        f"The {name} {list(matrix.shape)} has no Cholesky factor: its eigenvalues reach from {least:.3g} to "
        f"{largest:.3g}, and adding {JITTER_LADDER[-1]:g} of its mean diagonal did not help. Use a larger damping or "
        "prior_precision; without either a singular curvature has no inverse."
    )
