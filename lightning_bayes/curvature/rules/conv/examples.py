"""Sums for convolutions with many output positions: each c_i(W) is torch's weight gradient of a batch of one.

If a single example is enough work for torch's kernel, c_i(W) costs little more than 1/B of the batch gradient, and no
patches are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from lightning_bayes.curvature.rules.conv.shape import ConvShape
from lightning_bayes.curvature.rules.conv.windows import Conv, padded, padding
from lightning_bayes.curvature.workspace import Workspace

WEIGHT_GRADIENTS: tuple[Callable[..., Any], ...] = (conv1d_weight, conv2d_weight, conv3d_weight)
MIN_OPERATIONS = 2**23  # multiplications of one c_i(W)
MIN_POSITIONS = 512  # output positions of one example


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether one example is enough work for torch's CPU kernel."""
    is_large = shape.operations >= MIN_OPERATIONS and shape.positions >= MIN_POSITIONS
    return shape.groups == 1 and device.type == "cpu" and is_large


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)²; see `plan.WeightSums`."""
    shape, borders = layer.weight.shape, [padding(layer, axis) for axis in range(x.dim() - 2)]
    amounts = tuple(before for before, _ in borders)
    if layer.padding_mode != "zeros" or any(before != after for before, after in borders):
        x, amounts = padded(layer, x), (0,) * len(borders)
    weight_gradient = WEIGHT_GRADIENTS[x.dim() - 3]
    grad, square = workspace.result(shape, x).zero_(), workspace.result(shape, x).zero_()
    # Contiguous inputs make contiguous gradients.
    for pixels, delta in zip(*(torch.split(t.contiguous(), 1) for t in (x, grad_output)), strict=True):
        contribution = weight_gradient(pixels, shape, delta, layer.stride, amounts, layer.dilation, layer.groups)
        grad += contribution
        square.addcmul_(contribution, contribution)
    return grad, square
