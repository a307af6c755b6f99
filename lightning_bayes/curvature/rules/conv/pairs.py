"""A convolution with few output positions: its sums from pairs of positions, without any c_i.

With x̃_it the patch of the input that position t sees, and squares and products taken element-wise,

    c_i(W)  = Σ_t δ_it x̃_itᵀ
    c_i(W)² = Σ_t (δ_it²)(x̃_it²)ᵀ + 2 Σ_{t<u} (δ_it δ_iu)(x̃_it x̃_iu)ᵀ

so both sums over i are matrix products over examples and positions, or pairs of them.

Where positions are few the border is near: a kernel of 3 × 3 with a border of one lies 16 times on 2 × 2 pixels, not 36
times. There each offset k of the kernel, such as its upper left corner, has its own products, over the positions t ∈ V_k at
which it lies on a pixel p_k(t), and with this pixel in the place of the patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import Axis, ConvShape, conv_shape, counts_of_offsets, seen_along
from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.workspace import Workspace

MAX_PAIRS = 10  # for each offset of the kernel


class Offsets(NamedTuple):
    """Offsets of a kernel that see equally many pixels; or the whole kernel, as one offset that sees patches."""

    numbers: list[int]  # of the offsets, as in the flattened kernel
    positions: Tensor  # V_k, numbers of output positions, [offsets, |V_k|]
    pixels: Tensor  # p_k(t), numbers of input pixels, [offsets, |V_k|]


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether an offset of the kernel has few pairs of positions, each position's pair with itself included."""
    return shape.groups == 1 and shape.pairs_per_offset <= MAX_PAIRS


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)², for one group.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Gradient of its output, ``[B, Cout, *out]``.
        workspace: Holds the sums of each offset and says how many examples are taken at once.

    Returns:
        Both, shaped like the weight.
    """
    axes, positions = conv_shape(layer, x, grad_output).axes, grad_output.shape[2:]
    results = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    if min(counts_of_offsets(axes)) == positions.numel():  # no offset ever lies on the border
        totals = [result.view(1, len(result), -1) for result in results]
        _add_examples([_whole(positions.numel())], partial(_patches_first, layer), x, grad_output, totals, workspace)
    else:
        shape = math.prod(layer.kernel_size), layer.out_channels, layer.in_channels
        totals = [workspace.empty(f"{of} of offsets", shape, x) for of in ("sums", "squares")]
        _add_examples(_offsets(axes), _pixels_first, x, grad_output, totals, workspace)
        for result, total in zip(results, totals, strict=True):
            result.flatten(2).copy_(total.permute(1, 2, 0))
    return results[0], results[1].clamp_min_(0)  # rounding may end below zero


def _pixels_first(x: Tensor, _: torch.Size | None = None) -> Tensor:
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
    """Put Σ_i c_i and Σ_i c_i² into `totals`, each ``[offsets, Cout, channels]``.

    Args:
        groups: The offsets.
        values_first: Makes of the input what they see, ``[pixels, B, channels]``.
        x: Input.
        grad_output: Gradient of the output.
        totals: Overwritten.
        workspace: Says how many examples are taken at once.
    """
    # For each example: the values of the largest group, two factors of their pairs, and their products.
    most = max(len(group.numbers) * (n + 3 * n * (n + 1) // 2) for group in groups for n in [group.positions.shape[1]])
    for i, (some, grads) in enumerate(workspace.split(most * sum(totals[0].shape[1:]), x, grad_output)):
        delta, values = _pixels_first(grads), values_first(some, grads.shape[2:])
        for group in groups:
            _add_offsets(group, delta, values, totals, keep=i > 0)


def _add_offsets(group: Offsets, delta: Tensor, values: Tensor, totals: Sequence[Tensor], keep: bool) -> None:
    """Put both sums of the group's offsets into `totals`, or add them if their content is to be kept."""
    delta = delta[group.positions.to(delta.device)]  # [offsets, V, B, Cout]
    values = values[group.pixels.to(delta.device)]
    first, second = torch.triu_indices(delta.shape[1], delta.shape[1], device=delta.device)
    factors = 2 - (first == second).to(delta.dtype).view(-1, 1, 1)
    products = (delta[:, first] * delta[:, second]).mul_(factors), values[:, first] * values[:, second]
    for total, (left, right) in zip(totals, ((delta, values), products), strict=True):
        for number, rows, columns in zip(group.numbers, left.flatten(1, 2), right.flatten(1, 2), strict=True):
            total[number].addmm_(rows.T, columns, beta=int(keep))


def _whole(positions: int) -> Offsets:
    return Offsets([0], torch.arange(positions)[None], torch.arange(positions)[None])


@lru_cache(maxsize=256)
def _offsets(axes: tuple[Axis, ...]) -> list[Offsets]:
    """The kernel's offsets and what they see, grouped by how much that is."""
    groups: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for number, along in enumerate(product(*map(seen_along, axes))):
        seen = list(product(*along))  # for each position its (position, pixel) along each axis
        positions = [_flat([t for t, _ in pairs], [axis[1] for axis in axes]) for pairs in seen]
        pixels = [_flat([p for _, p in pairs], [axis[0] for axis in axes]) for pairs in seen]
        groups.setdefault(len(seen), []).append((number, positions, pixels))
    return [
        Offsets(
            [number for number, _, _ in group],
            torch.tensor([positions for _, positions, _ in group], dtype=torch.long),
            torch.tensor([pixels for _, _, pixels in group], dtype=torch.long),
        )
        for group in groups.values()
    ]


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat
