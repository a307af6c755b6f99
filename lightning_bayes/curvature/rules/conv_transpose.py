"""nn.ConvTranspose1d/2d/3d with stride, padding, output padding, dilation and groups.

The layer is the adjoint of a convolution, so input and output gradient swap roles. With δ̃_it the patch of the padded output
gradient at the outputs that input position t of example i contributes to,

    c_i(W) = Σ_t x_it δ̃_itᵀ        c_i(b) = Σ_u δ_iu
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv.windows import input_patches
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, layer_rule

ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@layer_rule(
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    parameters=("weight", "bias"),
    input_dims=lambda layer: layer.weight.dim(),
    cases=[
        (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (5, 4, 5)),
        (lambda: nn.ConvTranspose1d(4, 6, 3, padding=2, dilation=2, bias=False), (5, 4, 5)),
        (lambda: nn.ConvTranspose2d(4, 6, 3), (5, 4, 3, 5)),
        (lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2)), (5, 4, 3, 5)),
        (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=4), (5, 4, 3, 5)),
        (lambda: nn.ConvTranspose2d(4, 6, 1, stride=3), (5, 4, 3, 5)),  # outputs that no input reaches
        (lambda: nn.ConvTranspose3d(4, 6, (2, 3, 1), stride=(2, 1, 1), padding=(0, 1, 0), groups=2), (5, 4, 2, 3, 4)),
    ],
)
def conv_transpose(layer: ConvTranspose, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input is ``[B, Cin, *in]``, ``grad_output [B, Cout, *out]``."""
    x = inputs[0]  # `output_size` is not needed: grad_output has the output's size
    both_sides = [amount for axis in reversed(range(x.dim() - 2)) for amount in 2 * [int(layer.padding[axis])]]
    delta = input_patches(layer, F.pad(grad_output, both_sides), x.shape[2:])
    positions = x.reshape(len(x), layer.groups, layer.in_channels // layer.groups, -1)
    patches = delta.reshape(len(x), layer.groups, -1, positions.shape[-1])
    weight = positions @ patches.transpose(2, 3)  # [B, groups, Cin / groups, Cout / groups · |kernel|]
    return {"weight": weight.reshape(len(x), *layer.weight.shape), "bias": grad_output.flatten(2).sum(2)}
