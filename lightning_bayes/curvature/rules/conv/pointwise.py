"""A large convolution: its sums from every c_i(W), each computed as a pointwise convolution of its patches.

With the patches of example i as x̃_i, ``[K, T]``, and its output's gradient as δ_i, ``[Cout, T]``, the product

    c_i(W)ᵀ = x̃_i δ_iᵀ

is also a 1 × 1 convolution of K pixels with T channels by the weights δ_i. Convolutions come from oneDNN, which uses the
widest vectors of any processor; products come from MKL, which on AMD's does not, and take up to twice as long there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import ConvShape
from lightning_bayes.curvature.rules.conv.windows import Conv, assembled, input_patches, padded
from lightning_bayes.curvature.workspace import Workspace

BLOCK_ELEMENTS = 5 * 2**17  # of a c_i(W), 2.5 MiB of float32; larger ones come from fresh memory each time
IMAGES, WIDTH = 16, 2  # torch gives oneDNN no fewer images in one thread, and sees channels last in no narrower ones


MIN_OPERATIONS = 2**23  # of one c_i(W),
MIN_POSITIONS = 32  # and positions


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Where a c_i(W) takes many operations on a processor, in the type that oneDNN convolves fast."""
    is_large = shape.operations >= MIN_OPERATIONS and shape.positions >= MIN_POSITIONS
    return shape.groups == 1 and device.type == "cpu" and is_large and shape.dtype == torch.float32


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)², for one group.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Gradient of its output, ``[B, Cout, *out]``.
        workspace: Holds patches and sums, and says of how many examples borders are added at once.

    Returns:
        Both, shaped like the weight.
    """
    rows, size = layer.out_channels, layer.weight[0].numel()
    parts = -(-rows * size // BLOCK_ELEMENTS)
    pixels = -(-size // (parts * IMAGES * WIDTH)) * IMAGES * WIDTH  # of a part; behind the last are zeros
    patches = workspace.empty("patches", (parts * pixels, grad_output.shape[2:].numel()), x)
    patches[size:].zero_()
    totals = [workspace.empty(of, (parts, pixels, rows), x).zero_() for of in ("sums of rows", "squares of rows")]
    for some, grads in workspace.split(x[:1].numel(), x, grad_output):
        windows = input_patches(layer, padded(layer, some), grads.shape[2:])
        for seen, delta in zip(windows, grads.flatten(2), strict=True):
            patches[:size].view(seen.shape).copy_(seen)
            for part, grad, square in zip(torch.split(patches, pixels), *totals, strict=True):
                each = _product(part, delta)
                grad += each
                square.addcmul_(each, each)
    grad, square = (assembled(layer, total.flatten(0, 1).T[None, None], workspace) for total in totals)
    return grad, square


def _product(pixels: Tensor, delta: Tensor) -> Tensor:
    """``pixels [pixels, T]`` times the transpose of ``delta [rows, T]``."""
    images = pixels.view(IMAGES, -1, WIDTH, pixels.shape[1]).permute(0, 3, 1, 2)  # channels last in memory
    return F.conv2d(images, delta[:, :, None, None]).permute(0, 2, 3, 1).reshape(len(pixels), len(delta))
