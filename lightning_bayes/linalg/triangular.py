"""Products and inverses of upper-triangular matrices that skip most zeros."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # rows or columns of a triangular factor per product
MAX_SOLVE_SIDE = 128  # larger matrices are inverted by halves


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
