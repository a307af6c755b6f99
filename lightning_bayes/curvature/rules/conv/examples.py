"""A convolution with many output positions: its sums from every c_i(W), each the weight gradient of a batch of one.

Where one example alone is work enough for torch's own kernel, c_i(W) takes hardly more than its share of the batch's
gradient, and no patches are copied.
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

_GRADIENTS: tuple[Callable[..., Any], ...] = (conv1d_weight, conv2d_weight, conv3d_weight)


MIN_OPERATIONS = 2**23  # of one c_i(W),
MIN_POSITIONS = 512  # and positions


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether one example is work enough for torch's own kernel on a processor."""
    is_large = shape.operations >= MIN_OPERATIONS and shape.positions >= MIN_POSITIONS
    return shape.groups == 1 and device.type == "cpu" and is_large


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)².

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Gradient of its output, ``[B, Cout, *out]``.
        workspace: Holds the sums.

    Returns:
        Both, shaped like the weight.
    """
    shape, border = layer.weight.shape, [padding(layer, axis) for axis in range(x.dim() - 2)]
    amounts = tuple(before for before, _ in border)
    if layer.padding_mode != "zeros" or any(before != after for before, after in border):
        x, amounts = padded(layer, x), (0,) * len(border)
    weight_gradient = _GRADIENTS[x.dim() - 3]
    grad, square = workspace.result(shape, x).zero_(), workspace.result(shape, x).zero_()
    # One example at a time, with its dimension kept. In another memory format the gradients would come in it too.
    for pixels, delta in zip(*(torch.split(t.contiguous(), 1) for t in (x, grad_output)), strict=True):
        each = weight_gradient(pixels, shape, delta, layer.stride, amounts, layer.dilation, layer.groups)
        grad += each
        square.addcmul_(each, each)
    return grad, square
