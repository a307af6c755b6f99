"""nn.Linear with any leading dimensions: y = x Wᵀ + b.

    c_i(W) = Σ_t δ_it x_itᵀ        c_i(b) = Σ_t δ_it        t: positions between the example and the feature dimension

Without positions c_i(W) is a rank-one matrix, so Σ_i c_i² = (δ²)ᵀ (x²) needs no per-example matrix (Goodfellow 2015,
https://arxiv.org/abs/1510.01799).
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, Sums, per_example_rule, square_rule, sums_in_parts
from lightning_bayes.curvature.workspace import Workspace


@per_example_rule(nn.Linear)
def linear(layer: nn.Linear, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x [B, …, in]``, ``grad_output [B, …, out]``."""
    x, delta = x.reshape(len(x), -1, x.shape[-1]), grad_output.reshape(len(x), -1, grad_output.shape[-1])
    return {"weight": delta.transpose(1, 2) @ x, "bias": delta.sum(1)}


@square_rule(nn.Linear)
def linear_sums(layer: nn.Linear, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares; the rank-one identity where there are no positions."""
    if x.dim() > 2:
        return sums_in_parts(linear, layer, x, grad_output, workspace)
    delta_square, x_square = grad_output.square(), x.square()
    return {
        "weight": (grad_output.T @ x, delta_square.T @ x_square),
        "bias": (grad_output.sum(0), delta_square.sum(0)),
    }
