"""A layer's weight and bias as one matrix: the bias is the last column, the weight of an input that is always 1.

A convolution's kernel is flattened; its groups, which do not share weights, are a batch of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layer_matrix(weight: Tensor, bias: Tensor | None = None, groups: int = 1) -> Tensor:
    """Join weight and bias.

    Args:
        weight: ``[out, in]`` or ``[out, in / groups, *kernel]``.
        bias: ``[out]``, or None.
        groups: Groups of a convolution.

    Returns:
        ``[out, K]``, or ``[groups, out / groups, K]`` for more than one group, with K = in / groups · |kernel| and one
        more for the bias.

    Example:
        >>> layer_matrix(torch.zeros(1, 2), torch.ones(1))
        tensor([[0., 0., 1.]])
    """
    matrix = weight.flatten(1)
    if bias is not None:
        matrix = torch.cat([matrix, bias[:, None]], 1)
    return matrix if groups == 1 else torch.unflatten(matrix, 0, (groups, -1))


def layer_tensors(matrix: Tensor, weight_shape: torch.Size, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Inverse of `layer_matrix`.

    Args:
        matrix: ``[out, K]`` or ``[groups, out / groups, K]``.
        weight_shape: Shape of the weight.
        has_bias: Whether the last column is the bias.

    Returns:
        Weight and bias, or None in its place.
    """
    rows = matrix.reshape(-1, matrix.shape[-1])
    if not has_bias:
        return rows.reshape(weight_shape), None
    return rows[:, :-1].reshape(weight_shape), rows[:, -1].clone()
