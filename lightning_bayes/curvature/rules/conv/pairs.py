"""Squares for convolutions with few output positions: products over pairs of positions, without any c_i.

With x̃_it the input patch at position t, and element-wise squares and products,

    c_i(W)  = Σ_t δ_it x̃_itᵀ
    c_i(W)² = Σ_t (δ_it²)(x̃_it²)ᵀ + 2 Σ_{t<u} (δ_it δ_iu)(x̃_it x̃_iu)ᵀ

so the sum over i is a matrix product over examples and pairs of positions, with t = u included.

If positions are few, much of the kernel covers padding: a 3 × 3 kernel with padding 1 on 2 × 2 pixels covers 16 pixels, not
36. So each kernel offset k, such as the upper left corner, has separate products over the positions t ∈ V_k at which it
covers a pixel p_k(t), and this pixel replaces the patch.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import Axis, ConvShape, conv_shape, covered_along
from lightning_bayes.curvature.rules.conv.windows import Conv, padded
from lightning_bayes.curvature.workspace import Workspace

MAX_PAIRS = 10  # per kernel offset
MAX_OFFSETS = 32  # each has its own matrix products


class Offsets(NamedTuple):
    """Kernel offsets that cover equally many pixels."""

    indices: tuple[int, ...]  # in the flattened kernel
    positions: Tensor  # V_k, indices of output positions, [offsets, |V_k|]
    pixels: Tensor  # p_k(t), indices of input pixels, [offsets, |V_k|]


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether the kernel has few offsets with few pairs of positions, including pairs of a position with itself."""
    return shape.groups == 1 and len(shape.covered) <= MAX_OFFSETS and shape.pairs_per_offset <= MAX_PAIRS


def squares(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Tensor:
    """Σ_i c_i(W)² for one group; see `plan.WeightSquares`."""
    groups = _offsets(conv_shape(layer, x, grad_output).axes)
    x = x if layer.padding_mode == "zeros" else padded(layer, x)
    shape = math.prod(layer.kernel_size), layer.out_channels, layer.in_channels
    total = workspace.empty("squares of offsets", shape, x)
    channels = layer.out_channels + layer.in_channels
    for i, (x_part, grad_part) in enumerate(workspace.split(max(map(_values_of, groups)) * channels, x, grad_output)):
        delta, values = _pixels_first(grad_part), _pixels_first(x_part)
        for group in groups:
            _add_offsets(group, delta, values, total, accumulate=i > 0)
    result = x.new_empty(layer.weight.shape)
    result.flatten(2).copy_(total.permute(1, 2, 0))
    return result.clamp_min_(0)  # rounding can make squares negative


def _pixels_first(x: Tensor) -> Tensor:
    """``[B, channels, *pixels]`` as ``[pixels, B, channels]``, copied."""
    return x.flatten(2).permute(2, 0, 1).contiguous()


def _values_of(group: Offsets) -> int:
    """Number of values per example and channel: those of the group, both factors of their pairs, and their products."""
    num_offsets, num_values = group.positions.shape
    return num_offsets * (num_values + 3 * num_values * (num_values + 1) // 2)


def _add_offsets(group: Offsets, delta: Tensor, values: Tensor, total: Tensor, accumulate: bool) -> None:
    """Write the squares of the group's offsets to `total`, or add them with `accumulate`."""
    delta = delta[group.positions.to(delta.device)]  # [offsets, V, B, Cout]
    values = values[group.pixels.to(delta.device)]
    first, second = torch.triu_indices(delta.shape[1], delta.shape[1], device=delta.device)
    factors = 2 - (first == second).to(delta.dtype).view(-1, 1, 1)
    left = (delta[:, first] * delta[:, second]).mul_(factors)
    right = values[:, first] * values[:, second]
    for index, rows, columns in zip(group.indices, left.flatten(1, 2), right.flatten(1, 2), strict=True):
        total[index].addmm_(rows.T, columns, beta=int(accumulate))


@lru_cache(maxsize=256)
def _offsets(axes: tuple[Axis, ...]) -> list[Offsets]:
    """The kernel offsets and the pixels that they cover, grouped by the number of pixels."""
    input_sizes, output_sizes, *_ = zip(*axes, strict=True)
    all_pixels, all_positions = (torch.arange(math.prod(sizes)).view(sizes) for sizes in (input_sizes, output_sizes))
    groups: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for index, covered_by_axis in enumerate(product(*map(covered_along, axes))):
        positions, pixels = all_positions, all_pixels
        for dim, covered in enumerate(covered_by_axis):
            positions, pixels = positions.index_select(dim, covered[:, 0]), pixels.index_select(dim, covered[:, 1])
        groups.setdefault(positions.numel(), []).append((index, positions.flatten(), pixels.flatten()))
    columns = (zip(*group, strict=True) for group in groups.values())
    return [Offsets(indices, torch.stack(positions), torch.stack(pixels)) for indices, positions, pixels in columns]
