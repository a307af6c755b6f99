"""nn.Conv1d/2d/3d with stride, padding (all modes), dilation and groups.

With x̃_it the input patch that output position t of example i sees,

    c_i(W) = Σ_t δ_it x̃_itᵀ        c_i(b) = Σ_t δ_it

Few positions need no per-example matrix. One is a linear layer's rank-one identity, and a few expand into pairs:

    (Σ_t δ_t x̃_tᵀ)² = Σ_t (δ_t²)(x̃_t²)ᵀ + 2 Σ_{t<u} (δ_t δ_u)(x̃_t x̃_u)ᵀ        squares and products element-wise

which is one matrix product over (example, pair). From about a dozen positions on, the pairs cost more than they save.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, Sums, per_example_rule, square_rule, sums_in_chunks

MAX_PAIRED_POSITIONS = 4

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@per_example_rule(nn.Conv1d, input_dims=3)
@per_example_rule(nn.Conv2d, input_dims=4)
@per_example_rule(nn.Conv3d, input_dims=5)
def conv(layer: Conv, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x [B, Cin, *in]``, ``grad_output [B, Cout, *out]``."""
    delta, patches = _grouped(layer, x, grad_output)
    weight = delta @ patches.transpose(2, 3)  # [B, groups, Cout / groups, Cin / groups · |kernel|]
    return {"weight": weight.reshape(len(x), *layer.weight.shape), "bias": grad_output.flatten(2).sum(2)}


@square_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv_sums(layer: Conv, x: Tensor, grad_output: Tensor) -> Sums:
    """Sums of contributions and of their squares; by pairs of positions where there are few."""
    if grad_output.shape[2:].numel() > MAX_PAIRED_POSITIONS:
        return sums_in_chunks(conv, layer, x, grad_output)
    delta, patches = _grouped(layer, x, grad_output)
    t, u = torch.triu_indices(delta.shape[-1], delta.shape[-1], device=x.device)
    pairs = delta[..., t] * delta[..., u] * torch.where(t == u, 1, 2)
    square = _over_examples(pairs, patches[..., t] * patches[..., u]).clamp_min_(0)  # rounding may end below zero
    bias = grad_output.flatten(2).sum(2)
    return {
        "weight": (_over_examples(delta, patches).reshape(layer.weight.shape), square.reshape(layer.weight.shape)),
        "bias": (bias.sum(0), bias.square().sum(0)),
    }


def _over_examples(delta: Tensor, patches: Tensor) -> Tensor:
    """Σ_i Σ_t delta_it patches_itᵀ for each group, ``[groups, Cout / groups, K]``."""
    left = delta.permute(1, 2, 0, 3).flatten(2)  # [groups, Cout / groups, B · T]
    right = patches.permute(1, 0, 3, 2).flatten(1, 2)  # [groups, B · T, K]
    return left @ right


def _grouped(layer: Conv, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """δ ``[B, groups, Cout / groups, T]`` and x̃ ``[B, groups, K, T]``."""
    batch, groups = len(x), layer.groups
    delta = grad_output.reshape(batch, groups, layer.out_channels // groups, -1)
    patches = input_patches(layer, _padded(layer, x), grad_output.shape[2:])
    return delta, patches.reshape(batch, groups, -1, delta.shape[-1])


def input_patches(layer: nn.modules.conv._ConvNd, x: Tensor, positions: torch.Size) -> Tensor:
    """Every patch that the kernel sees: a view, which copies faster than `torch.nn.functional.unfold`.

    Args:
        layer: Gives kernel size, stride and dilation.
        x: Padded input, ``[B, C, *in]``.
        positions: Where the kernel stops, ``[*out]``.

    Returns:
        Patches, ``[B, C, *kernel, *out]``.
    """
    x = x.contiguous()
    batch, channel, *axes = x.stride()
    within = [axis * step for axis, step in zip(axes, layer.dilation, strict=True)]
    between = [axis * step for axis, step in zip(axes, layer.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *layer.kernel_size, *positions), (batch, channel, *within, *between))


def _padded(layer: Conv, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    last_axis_first = [amount for axis in reversed(range(x.dim() - 2)) for amount in _padding(layer, axis)]
    return F.pad(x, last_axis_first, mode) if any(last_axis_first) else x


def _padding(layer: Conv, axis: int) -> tuple[int, int]:
    if layer.padding == "same":  # stride is 1; the odd one goes to the right, as in torch
        total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    amount = 0 if layer.padding == "valid" else int(layer.padding[axis])
    return amount, amount
