"""nn.PReLU: y = max(x, 0) + w min(x, 0), with one w for all channels or one per channel.

    c_i(w) = Σ_t δ_it min(x_it, 0)        t: positions of a channel, or all positions and channels

δ_it is the gradient of the loss with respect to y_it.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, layer_rule


@layer_rule(
    nn.PReLU,
    parameters=("weight",),
    input_dims=1,
    cases=[
        (lambda: nn.PReLU(), (5, 4, 3)),
        (lambda: nn.PReLU(), (5,)),
        (lambda: nn.PReLU(4), (5, 4)),
        (lambda: nn.PReLU(4), (5, 4, 3, 3)),
    ],
)
def prelu(layer: nn.PReLU, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, …]``, or ``[B, C, …]`` with channels."""
    (x,) = inputs
    return {"weight": (grad_output * x.clamp_max(0)).reshape(len(x), layer.num_parameters, -1).sum(2)}
