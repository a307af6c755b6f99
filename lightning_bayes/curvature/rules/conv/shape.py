"""The sizes of a convolution that determine its strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.windows import Conv, borders_of

Axis: TypeAlias = tuple[int, int, int, int, int, int]  # input, output and kernel size, stride, dilation, padding before


class ConvShape(NamedTuple):
    """Sizes of one call of a convolution."""

    axes: tuple[Axis, ...]
    weights: int  # elements of the weight
    groups: int

    @property
    def covered(self) -> list[int]:
        """|V_k| of each kernel offset k: the number of output positions at which the offset covers a pixel."""
        return _counts_of_offsets(self.axes)

    @property
    def pairs_per_offset(self) -> float:
        """Mean of |V_k| (|V_k| + 1) / 2: the number of position pairs per kernel offset."""
        return sum(n * (n + 1) / 2 for n in self.covered) / len(self.covered)


def conv_shape(layer: Conv, x: Tensor, grad_output: Tensor) -> ConvShape:
    """The sizes of a call with input ``[B, Cin, *in]`` and output ``[B, Cout, *out]``."""
    borders = borders_of(layer.padding, layer.kernel_size, layer.dilation)
    sizes: Sequence[int] = x.shape[2:]
    if layer.padding_mode != "zeros":  # non-zero padding counts as pixels
        sizes = [size + sum(border) for size, border in zip(sizes, borders, strict=True)]
        borders = ((0, 0),) * len(borders)
    paddings = [before for before, _ in borders]
    axes = zip(sizes, grad_output.shape[2:], layer.kernel_size, layer.stride, layer.dilation, paddings, strict=True)
    return ConvShape(tuple(axes), layer.weight.numel(), layer.groups)


@lru_cache(maxsize=256)
def _counts_of_offsets(axes: tuple[Axis, ...]) -> list[int]:
    return [math.prod(map(len, pairs_by_axis)) for pairs_by_axis in product(*map(covered_along, axes))]


def covered_along(axis: Axis) -> list[Tensor]:
    """For each kernel offset along one axis: output positions and the pixels that the offset covers there, ``[n, 2]``."""
    size, num_positions, kernel, stride, dilation, before = axis
    positions = torch.arange(num_positions)
    pairs = [torch.stack([positions, positions * stride + k * dilation - before], 1) for k in range(kernel)]
    return [offset[(offset[:, 1] >= 0) & (offset[:, 1] < size)] for offset in pairs]
