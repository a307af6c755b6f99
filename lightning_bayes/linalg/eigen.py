"""Eigenvalues and eigenvectors of positive semi-definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import NonFiniteError


def symmetric_eigen(matrix: Tensor, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """λ and U with U diag(λ) Uᵀ = matrix; eigenvalues that rounding has made negative are 0.

    Args:
        matrix: Symmetric positive semi-definite, ``[..., n, n]``.
        name: Its name in error messages.

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
    if matrix.dim() > 2:  # factors of a grouped convolution
        each = [symmetric_eigen(part, name) for part in matrix]
        return torch.stack([values for values, _ in each]), torch.stack([vectors for _, vectors in each])
    # Units that are off, and kernels larger than the image, leave rows of zeros: 4249 of 4608 in a factor of ResNet-18.
    on = (matrix != 0).any(0)
    live, dead = on.nonzero()[:, 0], (~on).nonzero()[:, 0]
    values, vectors = matrix.new_zeros(len(matrix)), torch.zeros_like(matrix)
    found, vectors[live, len(dead) :] = _decomposed(matrix[live][:, live])
    values[len(dead) :] = found.clamp_min(0)
    vectors[dead, torch.arange(len(dead), device=dead.device)] = 1
    return values, vectors


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Divide and conquer, which fails for some matrices of low rank; relatively robust representations do not."""
    for attempt in (matrix, matrix.double()):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix), vectors.to(matrix)
    from scipy.linalg import eigh  # slow to import

    values, vectors = map(torch.from_numpy, eigh(matrix.double().cpu().numpy(), driver="evr"))
    return values.to(matrix), vectors.to(matrix)
