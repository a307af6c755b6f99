"""nn.RMSNorm: y = γ x̂, x̂ = x / √(mean(x²) + eps) over the last dimensions of each position t.

c_i(γ) = Σ_t δ_it x̂_it
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, per_example_rule


@per_example_rule(nn.RMSNorm, input_dims=lambda layer: 1 + len(layer.normalized_shape))
def rms_norm(layer: nn.RMSNorm, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x`` and ``grad_output`` are ``[B, …, *normalized_shape]``."""
    normalized = F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)
    return {"weight": (grad_output * normalized).reshape(len(x), -1, *layer.normalized_shape).sum(1)}
