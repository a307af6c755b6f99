"""Sums for convolutions with few output positions: products over pairs of positions, without any c_i.

With x̃_it the input patch at position t, and element-wise squares and products,

    c_i(W)  = Σ_t δ_it x̃_itᵀ
    c_i(W)² = Σ_t (δ_it²)(x̃_it²)ᵀ + 2 Σ_{t<u} (δ_it δ_iu)(x̃_it x̃_iu)ᵀ

so both sums over i are matrix products over examples and positions, or over examples and pairs of positions.

If positions are few, much of the kernel covers padding: a 3 × 3 kernel with padding 1 on 2 × 2 pixels covers 16 pixels, not
36. Then each kernel offset k, such as the upper left corner, has separate products over the positions t ∈ V_k at which it
covers a pixel p_k(t), and this pixel replaces the patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import Axis, ConvShape, conv_shape, counts_of_offsets, covered_along
from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.workspace import Workspace

MAX_PAIRS = 10  # per kernel offset


class Offsets(NamedTuple):
    """Kernel offsets that cover equally many pixels; or the whole kernel, as a single offset that covers patches."""

    indices: list[int]  # in the flattened kernel
    positions: Tensor  # V_k, indices of output positions, [offsets, |V_k|]
    pixels: Tensor  # p_k(t), indices of input pixels, [offsets, |V_k|]


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether kernel offsets have few pairs of positions, including pairs of a position with itself."""
    return shape.groups == 1 and shape.pairs_per_offset <= MAX_PAIRS


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)² for one group; see `plan.WeightSums`."""
    axes, positions = conv_shape(layer, x, grad_output).axes, grad_output.shape[2:]
    results = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    if min(counts_of_offsets(axes)) == positions.numel():  # no offset covers padding
        totals = [result.view(1, len(result), -1) for result in results]
        offsets = [_whole_kernel(positions.numel())]
        _add_examples(offsets, partial(_patches_first, layer), x, grad_output, totals, workspace)
    else:
        shape = math.prod(layer.kernel_size), layer.out_channels, layer.in_channels
        totals = [workspace.empty(f"{kind} of offsets", shape, x) for kind in ("sums", "squares")]
        _add_examples(_offsets(axes), lambda x, _: _pixels_first(x), x, grad_output, totals, workspace)
        for result, total in zip(results, totals, strict=True):
            result.flatten(2).copy_(total.permute(1, 2, 0))
    return results[0], results[1].clamp_min_(0)  # rounding can make squares negative


def _pixels_first(x: Tensor) -> Tensor:
    """``[B, channels, *pixels]`` as ``[pixels, B, channels]``, copied."""
    return x.flatten(2).permute(2, 0, 1).contiguous()


def _patches_first(layer: Conv, x: Tensor, positions: torch.Size) -> Tensor:
    """Patches, ``[T, B, Cin · |kernel|]``, copied."""
    patches = input_patches(layer, padded(layer, x), positions)  # [B, Cin, *kernel, *out]
    first = patches.dim() - len(positions)
    return patches.permute(*range(first, patches.dim()), *range(first)).reshape(positions.numel(), len(x), -1)


def _add_examples(
    groups: Sequence[Offsets],
    values_first: Callable[[Tensor, torch.Size], Tensor],
    x: Tensor,
    grad_output: Tensor,
    totals: Sequence[Tensor],
    workspace: Workspace,
) -> None:
    """Write Σ_i c_i and Σ_i c_i² to `totals`, each ``[offsets, Cout, channels]``.

    `values_first` converts the input to the values that the offsets cover, ``[pixels, B, channels]``.
    """
    # Per example: the values of a group, both factors of their pairs, and the products of the pairs.
    elements = []
    for group in groups:
        num_values = group.positions.shape[1]
        elements.append(len(group.indices) * (num_values + 3 * num_values * (num_values + 1) // 2))
    elements_per_example = max(elements) * sum(totals[0].shape[1:])
    for i, (x_part, grad_part) in enumerate(workspace.split(elements_per_example, x, grad_output)):
        delta, values = _pixels_first(grad_part), values_first(x_part, grad_part.shape[2:])
        for group in groups:
            _add_offsets(group, delta, values, totals, accumulate=i > 0)


def _add_offsets(group: Offsets, delta: Tensor, values: Tensor, totals: Sequence[Tensor], accumulate: bool) -> None:
    """Write both sums of the group's offsets to `totals`, or add them with `accumulate`."""
    delta = delta[group.positions.to(delta.device)]  # [offsets, V, B, Cout]
    values = values[group.pixels.to(delta.device)]
    first, second = torch.triu_indices(delta.shape[1], delta.shape[1], device=delta.device)
    factors = 2 - (first == second).to(delta.dtype).view(-1, 1, 1)
    products = (delta[:, first] * delta[:, second]).mul_(factors), values[:, first] * values[:, second]
    for total, (left, right) in zip(totals, ((delta, values), products), strict=True):
        for index, rows, columns in zip(group.indices, left.flatten(1, 2), right.flatten(1, 2), strict=True):
            total[index].addmm_(rows.T, columns, beta=int(accumulate))


def _whole_kernel(positions: int) -> Offsets:
    """The kernel as a single offset that covers one patch at every position."""
    return Offsets([0], torch.arange(positions)[None], torch.arange(positions)[None])


@lru_cache(maxsize=256)
def _offsets(axes: tuple[Axis, ...]) -> list[Offsets]:
    """The kernel offsets and the pixels that they cover, grouped by the number of pixels."""
    groups: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for index, pairs_by_axis in enumerate(product(*map(covered_along, axes))):
        covered = list(product(*pairs_by_axis))  # for each position: (position, pixel) along each axis
        positions = [_flat([t for t, _ in pairs], [axis[1] for axis in axes]) for pairs in covered]
        pixels = [_flat([p for _, p in pairs], [axis[0] for axis in axes]) for pairs in covered]
        groups.setdefault(len(covered), []).append((index, positions, pixels))
    offsets = []
    for group in groups.values():
        indices, positions_of, pixels_of = zip(*group, strict=True)
        offsets.append(
            Offsets(
                list(indices),
                torch.tensor(positions_of, dtype=torch.long),
                torch.tensor(pixels_of, dtype=torch.long),
            )
        )
    return offsets


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat
