"""nn.Conv1d/2d/3d with stride, padding (all modes), dilation and groups.

With x̃_it the input patch at output position t of example i,

    c_i(W) = Σ_t δ_it x̃_itᵀ        c_i(b) = Σ_t δ_it

`plan` selects the strategy for the squares. With few positions, they are products over pairs of positions, without any c_i
(`conv.pairs`). Otherwise every c_i is computed. This takes as many operations as the batch gradient, and memory traffic
dominates the cost. Small c_i are computed for many examples at once (`conv.patches`), large c_i example by example and block
by block (`conv.blocks`). docs/lab.md reports the speed-up of each strategy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv.plan import plan
from lightning_bayes.curvature.rules.conv.shape import conv_shape
from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Squares, layer_rule
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.private_torch import conv_helper

_HELPERS = {conv_helper(kind) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


@layer_rule(
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    parameters=("weight", "bias"),
    input_dims=lambda layer: layer.weight.dim(),
    applies=lambda layer: conv_helper(type(layer)) in _HELPERS,
    cases=[
        (lambda: nn.Conv1d(4, 6, 3), (5, 4, 9)),
        (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2, bias=False), (5, 4, 9)),
        (lambda: nn.Conv1d(4, 4, 5, stride=3, padding=2, groups=4, padding_mode="reflect"), (5, 4, 9)),
        (lambda: nn.Conv1d(4, 6, 7, groups=2), (5, 4, 9)),  # three positions
        (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(0, 2), bias=False), (5, 4, 7, 8)),
        (lambda: nn.Conv2d(4, 8, 3, dilation=(2, 1), groups=4, padding="valid"), (5, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(1, 2)), (5, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), padding_mode="circular"), (5, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="replicate"), (5, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (5, 4, 5, 5)),  # four positions
        (lambda: nn.Conv2d(2, 6, 5), (5, 2, 8, 8)),  # ten columns, padded to sixteen
        (lambda: nn.Conv2d(6, 4, (3, 4), groups=2), (5, 6, 7, 8)),
        (lambda: nn.Conv2d(3, 6, 3, stride=2), (5, 3, 9, 9)),
        (lambda: nn.Conv2d(2, 16, 3, padding=1), (5, 2, 5, 6)),  # sixteen rows: transposed products
        (lambda: nn.Conv2d(4, 32, 3, groups=2, stride=2), (5, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 1, 1)),  # one position
        (lambda: nn.Conv3d(4, 6, (1, 2, 3), padding=(0, 1, 2), groups=2), (5, 4, 3, 4, 5)),
        (lambda: nn.Conv3d(4, 4, 2, stride=(1, 2, 3), dilation=(2, 1, 1), groups=4, bias=False), (5, 4, 3, 4, 5)),
        (lambda: nn.Conv3d(4, 3, (2, 3, 2), padding="same", padding_mode="circular"), (5, 4, 3, 4, 5)),
        (lambda: nn.Conv3d(4, 3, (3, 4, 4)), (5, 4, 3, 4, 5)),  # two positions
    ],
)
def conv(layer: Conv, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input is ``[B, Cin, *in]``, ``grad_output [B, Cout, *out]``."""
    (x,) = inputs
    delta = torch.unflatten(grad_output.flatten(2), 1, (layer.groups, -1))  # [B, groups, Cout / groups, T]
    patches = input_patches(layer, padded(layer, x), grad_output.shape[2:])
    # [B, groups, Cin / groups · |kernel|, T]
    patches = patches.reshape(len(x), layer.groups, layer.weight[0].numel(), -1)
    weight = delta @ patches.transpose(2, 3)
    return {"weight": weight.reshape(len(x), *layer.weight.shape), "bias": grad_output.flatten(2).sum(2)}


@conv.fast_squares
def conv_squares(layer: Conv, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Squares:
    """Sums of squared contributions."""
    (x,) = inputs
    strategy = plan(conv_shape(layer, x, grad_output), x.device)
    found = {"weight": strategy.squares(layer, x, grad_output, workspace)}
    if layer.bias is not None:
        found["bias"] = grad_output.flatten(2).sum(2).square_().sum(0)
    return found
