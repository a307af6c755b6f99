"""nn.RMSNorm: y = γ x̂, x̂ = x / √(mean(x²) + eps) over the last dimensions at each position t.

c_i(γ) = Σ_t δ_it x̂_it
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, layer_rule


@layer_rule(
    nn.RMSNorm,
    parameters=("weight",),
    input_dims=lambda layer: 1 + len(layer.normalized_shape),
    takes_positions=True,
    cases=[(lambda: nn.RMSNorm(4), (5, 4)), (lambda: nn.RMSNorm((3, 4), eps=1e-3), (5, 2, 3, 4))],
)
def rms_norm(layer: nn.RMSNorm, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, …, *normalized_shape]``."""
    (x,) = inputs
    normalized = F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)
    return {"weight": (grad_output * normalized).reshape(len(x), -1, *layer.normalized_shape).sum(1)}
