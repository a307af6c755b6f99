"""nn.Conv1d/2d/3d with stride, padding (all modes), dilation and groups.

With x̃_it the input patch that output position t of example i sees,

    c_i(W) = Σ_t δ_it x̃_itᵀ        c_i(b) = Σ_t δ_it

Up to a few positions the sums need no c_i, but matrix products over pairs of positions (`rules.conv_pairs`). Otherwise every
c_i is computed, with as many operations as the batch's own gradient takes; what costs is memory traffic. Small ones are
computed for all examples at once, others one after the other: from patches (`rules.patches`), block by block
(`rules.conv_blocks`) or, where they take many operations, as convolutions (`rules.conv_pointwise`), and where an example has
very many positions by torch's own gradient (`rules.conv_examples`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv_blocks import sums_by_blocks
from lightning_bayes.curvature.rules.conv_examples import sums_by_examples
from lightning_bayes.curvature.rules.conv_pairs import pairs_per_offset, sums_by_pairs
from lightning_bayes.curvature.rules.conv_pointwise import sums_by_pointwise
from lightning_bayes.curvature.rules.patches import (
    VECTOR,
    Conv,
    assembled,
    goes_by_rows,
    input_patches,
    padded,
    patch_elements,
    patch_parts,
)
from lightning_bayes.curvature.rules.registry import PerExample, Sums, add_sums, per_example_rule, square_rule
from lightning_bayes.curvature.workspace import Workspace

# Measured on two cores with AVX-512; all choices follow from shapes.
MAX_PAIRS = 10  # for each offset of the kernel
MAX_BATCHED_ELEMENTS = 2**13  # of one c_i(W)
MIN_OPERATIONS = 2**23  # of one c_i(W), for convolutions that compute it,
POINTWISE_POSITIONS = 32  # and positions, for one of patches
OWN_POSITIONS = 512  # or for torch's own gradient
FAST_TYPES = (torch.float32,)  # of oneDNN's convolutions


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
    if layer.groups == 1 and pairs_per_offset(layer, x, grad_output) <= MAX_PAIRS:
        grad, square = sums_by_pairs(layer, x, grad_output, workspace)
    else:
        grad, square = _by_contributions(layer, x, grad_output, workspace)
    totals: Sums = {"weight": (grad, square)}
    if layer.bias is not None:
        add_sums(totals, "bias", grad_output.flatten(2).sum(2))
    return totals


def _by_contributions(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    # An accelerator would wait for one small kernel after the other.
    if layer.groups == 1 and x.is_cpu:
        positions = grad_output.shape[2:].numel()
        if positions * layer.weight.numel() >= MIN_OPERATIONS:
            if positions >= OWN_POSITIONS:
                return sums_by_examples(layer, x, grad_output, workspace)
            if positions >= POINTWISE_POSITIONS and x.dtype in FAST_TYPES:
                return sums_by_pointwise(layer, x, grad_output, workspace)
        if layer.weight.numel() > MAX_BATCHED_ELEMENTS:
            return sums_by_blocks(layer, x, grad_output, workspace)
    by_rows = goes_by_rows(layer, grad_output.shape[2:])
    elements = max(patch_elements(layer, x, grad_output, by_rows), layer.weight.numel())
    total: Sums = {}
    for x_part, grad_part in workspace.split(elements, x, grad_output):
        parts = patch_parts(layer, x_part, grad_part, by_rows, workspace)
        grad, square = _at_once(_delta(layer, grad_part), parts, workspace)
        known = total.get("weight")
        total["weight"] = (grad, square) if known is None else (known[0].add_(grad), known[1].add_(square))
    grad, square = (assembled(layer, values, workspace) for values in total["weight"])
    workspace.give_back(
        values for values in total["weight"] if values.data_ptr() not in {grad.data_ptr(), square.data_ptr()}
    )
    return grad, square


def _at_once(delta: Tensor, parts: list[Tensor], workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² with c_i = δ_i x̃_iᵀ, ``[parts, groups, Cout / groups, K]``."""
    rows, columns = delta.shape[2], parts[0].shape[2]
    transposed = rows % VECTOR == 0 and columns % VECTOR != 0
    shape = (columns, rows) if transposed else (rows, columns)
    products = workspace.empty("products", (len(parts), *delta.shape[:2], *shape), delta)
    for product, patches in zip(products.flatten(1, 2), parts, strict=True):
        first, second = (patches, delta) if transposed else (delta, patches)
        torch.bmm(first.flatten(0, 1), second.flatten(0, 1).transpose(1, 2), out=product)
    grad, square = products.sum(1), products.square_().sum(1)
    return (grad.transpose(2, 3), square.transpose(2, 3)) if transposed else (grad, square)


def _delta(layer: Conv, grad_output: Tensor) -> Tensor:
    """δ, ``[B, groups, Cout / groups, T]``."""
    return grad_output.reshape(len(grad_output), layer.groups, layer.out_channels // layer.groups, -1)


def _patches(layer: Conv, x: Tensor, grad_output: Tensor) -> Tensor:
    """x̃, ``[B, groups, K, T]`` with K = Cin / groups · |kernel|."""
    patches = input_patches(layer, padded(layer, x), grad_output.shape[2:])
    return patches.reshape(len(x), layer.groups, layer.weight[0].numel(), -1)
