"""nn.LayerNorm and timm's: y = γ x̂ + β, x̂ normalised over the last dimensions at each position t.

    c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it

δ_it is the gradient of the loss with respect to y_it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, layer_rule


def _of_timm() -> nn.Module:
    from timm.layers.norm import LayerNorm  # only the tests need timm

    layer: nn.Module = LayerNorm(4)
    return layer


@layer_rule(
    nn.LayerNorm,
    "timm.layers.norm.LayerNorm",
    parameters=("weight", "bias"),
    input_dims=lambda layer: 1 + len(layer.normalized_shape),
    takes_positions=True,
    cases=[
        (lambda: nn.LayerNorm(4), (5, 4)),
        (lambda: nn.LayerNorm((3, 4)), (5, 2, 3, 4)),
        (lambda: nn.LayerNorm(4, bias=False), (5, 2, 3, 4)),
        (_of_timm, (5, 3, 4)),
    ],
)
def layer_norm(layer: nn.LayerNorm, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, …, *normalized_shape]``."""
    (x,) = inputs
    normalized = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    positions = (len(x), -1, *layer.normalized_shape)
    return {
        "weight": (grad_output * normalized).reshape(positions).sum(1),
        "bias": grad_output.reshape(positions).sum(1),
    }
