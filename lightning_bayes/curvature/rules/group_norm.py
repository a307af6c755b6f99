"""nn.GroupNorm: y = γ x̂ + β, x̂ normalised over each group of channels of one example.

c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it        t: positions of a channel
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, per_example_rule


@per_example_rule(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x`` and ``grad_output`` are ``[B, C, …]``."""
    normalized = F.group_norm(x, layer.num_groups, eps=layer.eps)
    positions = (*x.shape[:2], -1)
    return {
        "weight": (grad_output * normalized).reshape(positions).sum(2),
        "bias": grad_output.reshape(positions).sum(2),
    }
