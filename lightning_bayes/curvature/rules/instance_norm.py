"""nn.InstanceNorm1d/2d/3d with affine=True: y = γ x̂ + β, x̂ normalised over each channel of an example.

    c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it        t: positions of a channel

In evaluation mode, a layer with running statistics uses them instead.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, layer_rule

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
_INPUT_DIMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


@layer_rule(
    *_INPUT_DIMS,
    parameters=("weight", "bias"),
    input_dims=lambda layer: next(dims for kind, dims in _INPUT_DIMS.items() if isinstance(layer, kind)),
    cases=[
        (lambda: nn.InstanceNorm1d(4, affine=True), (5, 4, 6)),
        (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (5, 4, 3, 3)),
        (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(), (5, 4, 3, 3)),
        (lambda: nn.InstanceNorm3d(4, affine=True).eval(), (5, 4, 2, 3, 3)),
    ],
)
def instance_norm(layer: InstanceNorm, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, C, …]``."""
    (x,) = inputs
    if layer.training or layer.running_mean is None:
        normalized = F.instance_norm(x, eps=layer.eps)
    else:
        normalized = F.instance_norm(x, layer.running_mean, layer.running_var, use_input_stats=False, eps=layer.eps)
    return {
        "weight": (grad_output * normalized).flatten(2).sum(2),
        "bias": grad_output.flatten(2).sum(2),
    }
