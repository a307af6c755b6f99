"""Factors of positive definite matrices: Cholesky factors with a stated jitter, triangular products, eigenvectors.

A running average of outer products is positive semi-definite. Rounding can make it indefinite, and a dead unit without
damping makes it singular. `cholesky` then adds jitter to the diagonal: each matrix of a batch gets the first value of
`JITTER_LADDER`, relative to the mean of its diagonal, with which it factorises. If all values fail, an error is raised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError

JITTER_LADDER = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)  # times the mean of the diagonal
BLOCK = 256  # rows or columns of a triangular factor per product
MAX_SOLVE_SIDE = 128  # larger triangular factors are inverted by halves


def cholesky(matrix: Tensor, name: str = "matrix") -> Tensor:
    """Lower-triangular L with L Lᵀ = matrix + jitter · I, ``[..., n, n]``; `name` stands in error messages."""
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
    """The upper-triangular R = L⁻ᵀ with R Rᵀ = matrix⁻¹: R ε with ε ~ N(0, I) has the covariance matrix⁻¹."""
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


def upper_matmul(upper: Tensor, x: Tensor) -> Tensor:
    """U X for an upper-triangular U ``[..., m, m]`` and X ``[..., m, n]``."""
    starts = range(0, upper.shape[-1], BLOCK)
    return torch.cat([upper[..., i : i + BLOCK, i:] @ x[..., i:, :] for i in starts], -2)


def matmul_upper(x: Tensor, upper: Tensor) -> Tensor:
    """X U for X ``[..., m, n]`` and an upper-triangular U ``[..., n, n]``."""
    stops = (start + BLOCK for start in range(0, upper.shape[-1], BLOCK))
    return torch.cat([x[..., :stop] @ upper[..., :stop, stop - BLOCK : stop] for stop in stops], -1)


def upper_inverse(upper: Tensor) -> Tensor:
    """U⁻¹ ``[..., n, n]`` by halves: the inverse of [[A, B], [0, D]] is [[A⁻¹, -A⁻¹ B D⁻¹], [0, D⁻¹]]."""
    # A triangular solve does not exploit the zeros of the identity and needs 50 % more multiplications.
    size = upper.shape[-1]
    if size <= MAX_SOLVE_SIDE:
        identity = torch.eye(size, dtype=upper.dtype, device=upper.device).expand_as(upper)
        solution: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
        return solution
    half, result = size // 2, torch.zeros_like(upper, memory_format=torch.contiguous_format)
    first, second = upper_inverse(upper[..., :half, :half]), upper_inverse(upper[..., half:, half:])
    result[..., :half, :half], result[..., half:, half:] = first, second
    result[..., :half, half:] = upper_matmul(first, matmul_upper(upper[..., :half, half:], second)).neg_()
    return result


def symmetric_eigen(matrix: Tensor, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """λ ``[..., n]``, ascending, and U with U diag(λ) Uᵀ = matrix; negative λ, which come from rounding, are set to 0."""
    require_finite(matrix, name, "network's outputs on these data")
    if matrix.dim() > 2:  # factors of a grouped convolution
        groups = [symmetric_eigen(part, name) for part in matrix]
        return torch.stack([values for values, _ in groups]), torch.stack([vectors for _, vectors in groups])
    # Dead units, and kernels larger than the image, leave rows of zeros: 4249 of 4608 in a factor of ResNet-18.
    is_live = (matrix != 0).any(0)
    live, dead = is_live.nonzero()[:, 0], (~is_live).nonzero()[:, 0]
    values, vectors = matrix.new_zeros(len(matrix)), torch.zeros_like(matrix)
    live_values, vectors[live, len(dead) :] = _decomposed(matrix[live][:, live])
    values[len(dead) :] = live_values.clamp_min(0)
    vectors[dead, torch.arange(len(dead), device=dead.device)] = 1
    return values, vectors


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Try divide and conquer, which can fail for low rank, also in float64; then relatively robust representations."""
    for attempt in (matrix, matrix.double()):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix), vectors.to(matrix)
    from scipy.linalg import eigh  # slow to import

    values, vectors = map(torch.from_numpy, eigh(matrix.double().cpu().numpy(), driver="evr"))
    return values.to(matrix), vectors.to(matrix)
