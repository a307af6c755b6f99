"""nn.PReLU: y = max(x, 0) + w min(x, 0), with one w or one for each channel.

c_i(w) = Σ_t δ_it min(x_it, 0)        t: positions of a channel, or all positions and channels
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, per_example_rule


@per_example_rule(nn.PReLU, input_dims=1)
def prelu(layer: nn.PReLU, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x`` and ``grad_output`` are ``[B, …]`` or, with channels, ``[B, C, …]``."""
    return {"weight": (grad_output * x.clamp_max(0)).reshape(len(x), layer.num_parameters, -1).sum(2)}
