"""nn.ConvTranspose1d/2d/3d with stride, padding, output padding, dilation and groups.

The layer is the adjoint of a convolution, so input and output gradient change places. With δ̃_it the patch of the padded
output gradient that input position t of example i has spread over,

    c_i(W) = Σ_t x_it δ̃_itᵀ        c_i(b) = Σ_u δ_iu
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.patches import input_patches
from lightning_bayes.curvature.rules.registry import PerExample, per_example_rule

ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@per_example_rule(nn.ConvTranspose1d, input_dims=3)
@per_example_rule(nn.ConvTranspose2d, input_dims=4)
@per_example_rule(nn.ConvTranspose3d, input_dims=5)
def conv_transpose(layer: ConvTranspose, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x [B, Cin, *in]``, ``grad_output [B, Cout, *out]``."""
    both_sides = [amount for axis in reversed(range(x.dim() - 2)) for amount in 2 * [int(layer.padding[axis])]]
    delta = input_patches(layer, F.pad(grad_output, both_sides), x.shape[2:])
    positions = x.reshape(len(x), layer.groups, layer.in_channels // layer.groups, -1)
    patches = delta.reshape(len(x), layer.groups, -1, positions.shape[-1])
    weight = positions @ patches.transpose(2, 3)  # [B, groups, Cin / groups, Cout / groups · |kernel|]
    return {"weight": weight.reshape(len(x), *layer.weight.shape), "bias": grad_output.flatten(2).sum(2)}
