"""nn.InstanceNorm1d/2d/3d with affine=True: y = γ x̂ + β, x̂ normalised over each channel of one example.

    c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it        t: positions of a channel

With running statistics, evaluation mode normalises by these instead.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, per_example_rule

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


@per_example_rule(nn.InstanceNorm1d, input_dims=3)
@per_example_rule(nn.InstanceNorm2d, input_dims=4)
@per_example_rule(nn.InstanceNorm3d, input_dims=5)
def instance_norm(layer: InstanceNorm, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x`` and ``grad_output`` are ``[B, C, …]``."""
    if layer.training or layer.running_mean is None:
        normalized = F.instance_norm(x, eps=layer.eps)
    else:
        normalized = F.instance_norm(x, layer.running_mean, layer.running_var, use_input_stats=False, eps=layer.eps)
    return {
        "weight": (grad_output * normalized).flatten(2).sum(2),
        "bias": grad_output.flatten(2).sum(2),
    }
