"""nn.Conv1d/2d/3d with stride, padding (all modes), dilation and groups.

With x̃_it the input patch that output position t of example i sees,

    c_i(W) = Σ_t δ_it x̃_itᵀ        c_i(b) = Σ_t δ_it

Up to a few positions Σ_i c_i² needs no c_i, but one matrix product over pairs of positions:

    (Σ_t δ_t x̃_tᵀ)² = Σ_t (δ_t²)(x̃_t²)ᵀ + 2 Σ_{t<u} (δ_t δ_u)(x̃_t x̃_u)ᵀ        squares and products element-wise

Otherwise every c_i is computed, with as many operations as the batch's own gradient takes; what costs is memory traffic.
Small ones are computed for all examples at once, large ones one after the other, in blocks of rows that stay in the
processors' caches. See `rules.patches` for how patches are copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.patches import (
    Conv,
    assembled,
    channels_first,
    goes_by_rows,
    input_patches,
    padded,
    patch_elements,
    patch_parts,
    pixel_parts,
    positions_first,
)
from lightning_bayes.curvature.rules.registry import PerExample, Sums, per_example_rule, square_rule
from lightning_bayes.curvature.workspace import Workspace

# Measured on two cores with AVX-512 and 1 MiB of L2 cache each; all choices follow from shapes.
MAX_PAIRED_POSITIONS = 4
MAX_BATCHED_ELEMENTS = 2**13  # of one c_i(W)
BLOCK_ELEMENTS = 3 * 2**16  # for each processor; 768 KiB of float32


@per_example_rule(nn.Conv1d, input_dims=3)
@per_example_rule(nn.Conv2d, input_dims=4)
@per_example_rule(nn.Conv3d, input_dims=5)
def conv(layer: Conv, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x [B, Cin, *in]``, ``grad_output [B, Cout, *out]``."""
    weight = _delta(layer, grad_output) @ _patches(layer, x, grad_output).transpose(2, 3)
    return {"weight": weight.reshape(len(x), *layer.weight.shape), "bias": grad_output.flatten(2).sum(2)}


@square_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv_sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares."""
    if grad_output.shape[2:].numel() <= MAX_PAIRED_POSITIONS and layer.groups == 1:
        grad, square = _by_pairs(layer, x, grad_output, workspace)
    else:
        grad, square = _by_contributions(layer, x, grad_output, workspace)
    totals = {"weight": (grad, square)}
    if layer.bias is not None:
        bias = grad_output.flatten(2).sum(2)
        totals["bias"] = (bias.sum(0), bias.square_().sum(0))
    return totals


def _by_pairs(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    positions = grad_output.shape[2:].numel()
    elements = (positions * (positions + 1) // 2 + positions) * (layer.weight[0].numel() + layer.out_channels)
    grad, square = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    for i, (x_part, grad_part) in enumerate(_split(workspace.examples_at_once(elements), x, grad_output)):
        _add_pairs(layer, x_part, grad_part, (grad.view(len(grad), -1), square.view(len(grad), -1)), i > 0, workspace)
    return grad, square.clamp_min_(0)  # rounding may end below zero


def _add_pairs(
    layer: Conv, x: Tensor, grad_output: Tensor, totals: tuple[Tensor, Tensor], keep: bool, workspace: Workspace
) -> None:
    """Put Σ_i c_i and Σ_i c_i² into `totals`, each ``[Cout, K]``, or add them if their content is to be kept."""
    delta = grad_output.flatten(2).permute(2, 0, 1).contiguous()  # [T, B, Cout]
    patches = positions_first(layer, x, grad_output, workspace)  # [T, B, K]
    delta_pairs, patch_pairs = (
        workspace.empty(purpose, (len(delta) * (len(delta) + 1) // 2, *values.shape[1:]), x)
        for purpose, values in (("delta pairs", delta), ("products", patches))
    )
    first = 0
    for t in range(len(delta)):
        pairs = slice(first, first + len(delta) - t)
        torch.mul(delta[t], delta[t:], out=delta_pairs[pairs])
        torch.mul(patches[t], patches[t:], out=patch_pairs[pairs])
        patch_pairs[first + 1 : pairs.stop] *= 2
        first = pairs.stop
    totals[0].addmm_(delta.flatten(0, 1).T, patches.flatten(0, 1), beta=int(keep))
    totals[1].addmm_(delta_pairs.flatten(0, 1).T, patch_pairs.flatten(0, 1), beta=int(keep))


def _by_contributions(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    # An accelerator would wait for one small kernel after the other.
    if layer.groups == 1 and layer.weight.numel() > MAX_BATCHED_ELEMENTS and x.is_cpu:
        return _by_blocks(layer, x, grad_output, workspace)
    by_rows = goes_by_rows(layer, grad_output)
    elements = max(patch_elements(layer, x, grad_output, by_rows), layer.weight.numel())
    total: Sums = {}
    for x_part, grad_part in _split(workspace.examples_at_once(elements), x, grad_output):
        parts = patch_parts(layer, x_part, grad_part, by_rows, workspace)
        grad, square = _at_once(_delta(layer, grad_part), parts, workspace)
        known = total.get("weight")
        total["weight"] = (grad, square) if known is None else (known[0].add_(grad), known[1].add_(square))
    grad, square = (assembled(layer, values, workspace) for values in total["weight"])
    workspace.give_back(
        values for values in total["weight"] if values.data_ptr() not in {grad.data_ptr(), square.data_ptr()}
    )
    return grad, square


def _by_blocks(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² example by example, for one group."""
    by_rows, rows = goes_by_rows(layer, grad_output), _rows_of_a_block(layer)
    elements = patch_elements(layer, x, grad_output, by_rows)
    # Patches that a single block reads stay in the cache too.
    room = BLOCK_ELEMENTS // elements if rows == layer.out_channels else workspace.examples_at_once(elements)
    at_once = min(max(1, room), len(x))
    known = pixel_parts(layer, x, grad_output, by_rows, workspace) if at_once == len(x) else None
    grad, square = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    for grad_rows, square_rows, delta in _split(rows, grad, square, grad_output.transpose(0, 1)):
        sums = [workspace.empty(purpose, grad_rows.shape, x).zero_() for purpose in ("grad sum", "square sum")]
        for x_part, delta_part in _split(at_once, x, delta.transpose(0, 1)):
            parts = pixel_parts(layer, x_part, delta_part, by_rows, workspace) if known is None else known
            _add_each(sums[0], sums[1], delta_part.flatten(2), parts, workspace)
        for result, found in zip((grad_rows, square_rows), sums, strict=True):
            result.copy_(channels_first(layer, found.view(parts.shape[1], len(result), -1)))
    return grad, square


def _add_each(grad: Tensor, square: Tensor, delta: Tensor, parts: Tensor, workspace: Workspace) -> None:
    """Add c_i = δ_i x̃_i, ``[parts, rows, K]``, and its square, for each example."""
    # Processors take whole matrices of a batched product, and so their own share of what follows: one for each of them.
    lanes = math.gcd(delta.shape[1], torch.get_num_threads()) if parts.shape[1] == 1 else 1
    deltas = torch.unflatten(delta, 1, (lanes, -1)).expand(-1, max(lanes, parts.shape[1]), -1, -1)
    patches = parts.expand(-1, deltas.shape[1], -1, -1)
    product = workspace.empty("products", grad.shape, delta)
    matrices = product.view(deltas.shape[1], deltas.shape[2], -1)
    for one_delta, one_patches in zip(deltas, patches, strict=True):
        torch.bmm(one_delta, one_patches, out=matrices)
        grad += product
        square.addcmul_(product, product)


def _rows_of_a_block(layer: Conv) -> int:
    rows = len(layer.weight)
    while rows * layer.weight[0].numel() > BLOCK_ELEMENTS * torch.get_num_threads() and rows > 1:
        rows = (rows + 1) // 2
    return rows


def _at_once(delta: Tensor, parts: list[Tensor], workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² with c_i = δ_i x̃_iᵀ, ``[parts, groups, Cout / groups, K]``."""
    products = workspace.empty("products", (len(parts), *delta.shape[:3], parts[0].shape[2]), delta)
    for product, patches in zip(products.flatten(1, 2), parts, strict=True):
        torch.bmm(delta.flatten(0, 1), patches.flatten(0, 1).transpose(1, 2), out=product)
    return products.sum(1), products.square_().sum(1)


def _split(size: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def _delta(layer: Conv, grad_output: Tensor) -> Tensor:
    """δ, ``[B, groups, Cout / groups, T]``."""
    return grad_output.reshape(len(grad_output), layer.groups, layer.out_channels // layer.groups, -1)


def _patches(layer: Conv, x: Tensor, grad_output: Tensor) -> Tensor:
    """x̃, ``[B, groups, K, T]`` with K = Cin / groups · |kernel|."""
    patches = input_patches(layer, padded(layer, x), grad_output.shape[2:])
    return patches.reshape(len(x), layer.groups, layer.weight[0].numel(), -1)
