"""Where IVON starts without settings: noise of a tenth of the weights' size, and SGD's learning rate. A heuristic.

    s₀ = τ / (Ñ (κ₀ r)²)      κ₀ = 0.1; r: root mean square of the weights of all matrices and filters
    α  → α s₀                  SGD's learning rate lr with momentum μ is α = lr / (1 - μ): often 1
    β₂ = 1 - 2 / T             T: updates of the run, which a callback knows

The paper's settings for CIFAR-10 have this ratio of noise and weights, and (1-β₂) T = 2, in 200,000 updates. Its
β₂ = 0.99999 leaves s at s₀ in a short run, and its α = 0.2 is a fifth of the usual SGD's: long runs need no more.
"""

from __future__ import annotations

import math
from typing import Final

from torch import nn

NOISE: Final = 0.1  # κ₀
REFRESHED: Final = 2.0  # (1-β₂) T


def starting_precision(model: nn.Module) -> float:
    """1 / (κ₀ r)² of the model's trainable weights."""
    weights = [param.detach() for param in model.parameters() if param.requires_grad]
    weights = [weight for weight in weights if weight.dim() > 1] or weights
    squares = sum(float(weight.double().square().sum()) for weight in weights)
    size = math.sqrt(squares / max(1, sum(weight.numel() for weight in weights)))
    return 1 / (NOISE * (size or 1.0)) ** 2


def weight_of_old_curvature(updates: float) -> float:
    """β₂ for a run of `updates` updates."""
    return 1 - min(0.5, REFRESHED / updates)
