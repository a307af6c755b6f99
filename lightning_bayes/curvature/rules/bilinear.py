"""nn.Bilinear with any leading dimensions: y_o = x₁ᵀ W_o x₂ + b_o.

    c_i(W_o) = Σ_t δ_ito x₁_it x₂_itᵀ        c_i(b) = Σ_t δ_it

t runs over positions, the dimensions between examples and features. Without positions, c_i(W) has rank one, so Σ_i c_i² is
the same product of δ², x₁² and x₂², and no c_i is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, draws, layer_rule
from lightning_bayes.curvature.workspace import Workspace


@layer_rule(
    nn.Bilinear,
    parameters=("weight", "bias"),
    example_dims=(0, 0),
    cases=[
        (lambda: nn.Bilinear(3, 4, 2), draws((5, 3), (5, 4))),
        (lambda: nn.Bilinear(3, 4, 2, bias=False), draws((5, 6, 3), (5, 6, 4))),
        (lambda: nn.Bilinear(1, 4, 3), draws((5, 2, 6, 1), (5, 2, 6, 4))),
    ],
)
def bilinear(layer: nn.Bilinear, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the inputs are ``[B, …, in1]`` and ``[B, …, in2]``, ``grad_output [B, …, out]``."""
    first, second, delta = (values.reshape(len(values), -1, values.shape[-1]) for values in (*inputs, grad_output))
    return {"weight": torch.einsum("bto,bti,btj->boij", delta, first, second), "bias": delta.sum(1)}


@bilinear.fast_sums
def bilinear_sums(layer: nn.Bilinear, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares; uses the rank-one identity without positions."""
    if grad_output.dim() > 2:
        return bilinear.sums_in_parts(layer, inputs, grad_output, workspace)
    factors = (grad_output, *inputs)
    squares = [factor.square() for factor in factors]
    weight, square = (torch.einsum("bo,bi,bj->oij", *tensors) for tensors in (factors, squares))
    return {"weight": (weight, square), "bias": (grad_output.sum(0), squares[0].sum(0))}
