"""nn.GroupNorm: y = γ x̂ + β, x̂ normalised over each channel group of an example.

    c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it        t: positions of a channel

δ_it is the gradient of the loss with respect to y_it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, layer_rule


@layer_rule(
    nn.GroupNorm,
    parameters=("weight", "bias"),
    cases=[(lambda: nn.GroupNorm(2, 4), (5, 4)), (lambda: nn.GroupNorm(1, 4), (5, 4, 3, 3))],
)
def group_norm(layer: nn.GroupNorm, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, C, …]``."""
    (x,) = inputs
    normalized = F.group_norm(x, layer.num_groups, eps=layer.eps)
    positions = (*x.shape[:2], -1)
    return {
        "weight": (grad_output * normalized).reshape(positions).sum(2),
        "bias": grad_output.reshape(positions).sum(2),
    }
