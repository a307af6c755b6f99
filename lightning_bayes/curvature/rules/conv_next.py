"""torchvision's block of ConvNeXt: y = x + b ⊙ (γ ⊙ h(x)), where h has layers of its own and b is stochastic depth.

    c_i(γ) = Σ_t b_i δ_it h(x_i)_t

The rule covers the scale γ alone and repeats the forward of h; the layers of h have their own rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, add_sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace


def _block() -> nn.Module:
    from torchvision.models.convnext import CNBlock

    block: nn.Module = CNBlock(4, layer_scale=0.5, stochastic_depth_prob=0.0)
    return block


@layer_rule(
    "torchvision.models.convnext.CNBlock",
    parameters=("layer_scale",),
    input_dims=4,
    repeats_noise=lambda layer: layer.training and layer.stochastic_depth.p > 0,
    own_only=True,
    cases=[(_block, (5, 4, 6, 6))],
)
@torch.no_grad()
def conv_next_block(layer: Any, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, C, H, W]``."""
    (x,) = inputs
    delta = layer.stochastic_depth(grad_output)  # linear: multiplies each row by its noise
    return {"layer_scale": (delta * layer.block(x)).sum((2, 3))[..., None, None]}


@conv_next_block.fast_sums
def conv_next_block_sums(layer: Any, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums over the whole batch, so that the noise of the forward is repeated."""
    totals: Sums = {}
    add_sums(totals, "layer_scale", conv_next_block.contributions(layer, inputs, grad_output)["layer_scale"])
    return totals
