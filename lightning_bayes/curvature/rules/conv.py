"""nn.Conv2d with stride, padding (all modes), dilation and groups.

With x̃_it the input patch that output position t of example i sees,

    c_i(W) = Σ_t δ_it x̃_itᵀ        c_i(b) = Σ_t δ_it
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, per_example_rule


@per_example_rule(nn.Conv2d)
def conv2d(layer: nn.Conv2d, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x [B, Cin, H, W]``, ``grad_output [B, Cout, H', W']``."""
    batch, groups = len(x), layer.groups
    patches = F.unfold(_padded(layer, x), layer.kernel_size, layer.dilation, 0, layer.stride)  # [B, Cin·kh·kw, T]
    delta = grad_output.reshape(batch, groups, layer.out_channels // groups, -1)
    patches = patches.reshape(batch, groups, -1, patches.shape[-1])
    weight = delta @ patches.transpose(2, 3)  # [B, groups, Cout / groups, Cin / groups · kh · kw]
    return {"weight": weight.reshape(batch, *layer.weight.shape), "bias": grad_output.sum((2, 3))}


def _padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    left_right_top_bottom = [amount for axis in (1, 0) for amount in _padding(layer, axis)]
    return F.pad(x, left_right_top_bottom, mode) if any(left_right_top_bottom) else x


def _padding(layer: nn.Conv2d, axis: int) -> tuple[int, int]:
    if layer.padding == "same":  # stride is 1; the odd one goes to the right, as in torch
        total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    amount = 0 if layer.padding == "valid" else int(layer.padding[axis])
    return amount, amount
