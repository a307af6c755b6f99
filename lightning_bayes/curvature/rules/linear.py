"""nn.Linear with any leading dimensions: y = x Wᵀ + b.

    c_i(W) = Σ_t δ_it x_itᵀ        c_i(b) = Σ_t δ_it        t: positions, the dimensions between examples and features

Without positions, c_i(W) has rank one, so Σ_i c_i² = (δ²)ᵀ (x²) needs no per-example matrix (Goodfellow 2015,
https://arxiv.org/abs/1510.01799). With positions, every c_i(W) is computed; large ones are computed one by one.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_bayes.curvature.rules.products import sums_by_blocks
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, add_sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace

MAX_BATCHED_ELEMENTS = 50_000  # of one c_i(W), tuned on two cores with AVX-512


@layer_rule(
    nn.Linear,
    parameters=("weight", "bias"),
    takes_positions=True,
    cases=[
        (lambda: nn.Linear(4, 3), (5, 4)),
        (lambda: nn.Linear(4, 3, bias=False), (5, 6, 4)),
        (lambda: nn.Linear(4, 3), (5, 2, 6, 4)),
    ],
)
def linear(layer: nn.Linear, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input is ``[B, …, in]``, ``grad_output [B, …, out]``."""
    x, delta = _with_positions(inputs[0], grad_output)
    return {"weight": delta.transpose(1, 2) @ x, "bias": delta.sum(1)}


@linear.fast_sums
def linear_sums(layer: nn.Linear, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares; uses the rank-one identity without positions."""
    (x,) = inputs
    if x.dim() > 2:
        x, delta = _with_positions(x, grad_output)
        totals: Sums = {"weight": matrix_sums(x, delta, workspace)}
        add_sums(totals, "bias", delta.sum(1))
        return totals
    delta_square, x_square = grad_output.square(), x.square()
    return {
        "weight": (grad_output.T @ x, delta_square.T @ x_square),
        "bias": (grad_output.sum(0), delta_square.sum(0)),
    }


def matrix_sums(x: Tensor, delta: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² of c_i = Σ_t δ_it x_itᵀ, ``[out, in]``, from ``[B, T, in]`` and ``[B, T, out]``."""
    elements = x.shape[-1] * delta.shape[-1]
    # On an accelerator, launching many small kernels would dominate.
    if elements > MAX_BATCHED_ELEMENTS and x.is_cpu:
        shape = delta.shape[-1], x.shape[-1]
        sums = workspace.result(shape, x), workspace.result(shape, x)
        sums_by_blocks(delta.mT, x, sums, workspace)
        return sums
    totals: Sums = {}
    for x_part, delta_part in workspace.split(elements, x, delta):
        add_sums(totals, "matrix", delta_part.mT @ x_part)
    return totals["matrix"]


def _with_positions(x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, T, in]`` and ``[B, T, out]``."""
    return x.reshape(len(x), -1, x.shape[-1]), grad_output.reshape(len(x), -1, grad_output.shape[-1])
