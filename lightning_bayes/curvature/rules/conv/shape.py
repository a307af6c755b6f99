"""The sizes that decide how a convolution's sums are computed."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.windows import Conv, padding

Axis: TypeAlias = tuple[int, int, int, int, int, int]  # input, output and kernel size, stride, dilation, border before


class ConvShape(NamedTuple):
    """Sizes of one call of a convolution."""

    axes: tuple[Axis, ...]
    weights: int  # elements of the weight
    groups: int
    dtype: torch.dtype

    @property
    def positions(self) -> int:
        """Output positions of one example, T."""
        return math.prod(axis[1] for axis in self.axes)

    @property
    def operations(self) -> int:
        """Multiplications of one c_i(W), for one group."""
        return self.positions * self.weights

    @property
    def pairs_per_offset(self) -> float:
        """Mean of |V_k| (|V_k| + 1) / 2: the pairs of positions that an offset of the kernel has."""
        counts = counts_of_offsets(self.axes)
        return sum(n * (n + 1) / 2 for n in counts) / len(counts)


def conv_shape(layer: Conv, x: Tensor, grad_output: Tensor) -> ConvShape:
    """The sizes of a call.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Shaped like its output, ``[B, Cout, *out]``.

    Returns:
        The sizes.
    """
    borders = [padding(layer, axis) for axis in range(x.dim() - 2)]
    sizes = list(x.shape[2:])
    if layer.padding_mode != "zeros":  # borders are pixels too
        sizes = [size + sum(border) for size, border in zip(sizes, borders, strict=True)]
        borders = [(0, 0)] * len(borders)
    before = [border[0] for border in borders]
    axes = zip(sizes, grad_output.shape[2:], layer.kernel_size, layer.stride, layer.dilation, before, strict=True)
    return ConvShape(tuple(axes), layer.weight.numel(), layer.groups, x.dtype)


@lru_cache(maxsize=256)
def counts_of_offsets(axes: tuple[Axis, ...]) -> list[int]:
    """|V_k| of every offset k of the kernel: the output positions at which it lies on a pixel."""
    return [math.prod(map(len, along)) for along in product(*map(seen_along, axes))]


def seen_along(axis: Axis) -> list[list[tuple[int, int]]]:
    """For each offset along one axis the output positions at which it lies on a pixel, and the pixel."""
    size, positions, kernel, stride, dilation, before = axis
    pixels = [[(t, t * stride + k * dilation - before) for t in range(positions)] for k in range(kernel)]
    return [[(t, p) for t, p in of_offset if 0 <= p < size] for of_offset in pixels]
