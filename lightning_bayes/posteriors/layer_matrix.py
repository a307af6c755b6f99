"""A layer's weight and bias as one matrix. The bias is the last column: the weight of a constant input 1.

Convolution kernels are flattened. The groups of a convolution do not share weights and form a batch of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layer_matrix(weight: Tensor, bias: Tensor | None = None, groups: int = 1) -> Tensor:
    """Weight and bias as ``[out, K]`` or ``[groups, out / groups, K]``; K = in / groups · |kernel|, + 1 with a bias."""
    matrix = weight.flatten(1)
    if bias is not None:
        matrix = torch.cat([matrix, bias[:, None]], 1)
    return matrix if groups == 1 else torch.unflatten(matrix, 0, (groups, -1))


def layer_tensors(matrix: Tensor, weight_shape: torch.Size, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Inverse of `layer_matrix`: the weight, and the bias or None."""
    rows = matrix.reshape(-1, matrix.shape[-1])
    if not has_bias:
        return rows.reshape(weight_shape), None
    return rows[:, :-1].reshape(weight_shape), rows[:, -1].clone()


def set_layer(values: dict[str, Tensor], matrix: Tensor, weight: str, bias: str | None, shape: torch.Size) -> None:
    """Split a layer matrix; store the weight of this shape, and the bias unless None, under their names."""
    values[weight], bias_values = layer_tensors(matrix, shape, bias is not None)
    if bias is not None and bias_values is not None:
        values[bias] = bias_values
