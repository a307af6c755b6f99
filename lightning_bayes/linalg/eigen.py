"""Eigenvalues and eigenvectors of positive semi-definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import NonFiniteError


def symmetric_eigen(matrix: Tensor, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """λ and U with U diag(λ) Uᵀ = matrix; eigenvalues that rounding has made negative are 0.

    Args:
        matrix: Symmetric positive semi-definite, ``[..., n, n]``.
        name: What error messages call it.

    Returns:
        λ ``[..., n]``, ascending, and U ``[..., n, n]``.

    Raises:
        NonFiniteError: If an entry is not finite.

    Example:
        >>> symmetric_eigen(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))[0]
        tensor([1., 2.])
    """
    wrong = int((~matrix.isfinite()).sum())
    if wrong:
        raise NonFiniteError(
            f"The {name} {list(matrix.shape)} has {wrong} entries that are not finite. Look for an overflow in the "
            "network's outputs on these data."
        )
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # single precision, for large matrices of low rank
        values, vectors = (part.to(matrix.dtype) for part in torch.linalg.eigh(matrix.double()))
    return values.clamp_min(0), vectors
