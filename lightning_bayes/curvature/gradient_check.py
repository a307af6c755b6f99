"""The check of a pass: the contributions of the examples add up to the gradient that autograd computes.

Σ_i c_i + ∂L₀/∂θ = ∂L/∂θ        L₀: terms that depend on no example, such as a penalty on the weights
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

ByParameter: TypeAlias = dict[nn.Parameter, Tensor]


def failing_parameters(
    sums: ByParameter,
    squares: ByParameter,
    grads: ByParameter,
    constant: Callable[[list[nn.Parameter]], ByParameter],
    is_half: bool,
) -> set[nn.Parameter] | None:
    """The parameters whose Σ_i c_i and gradient differ; None if a number is not finite. `constant` gives ∂L₀/∂θ."""
    largest = max((float(grad.abs().max()) for grad in grads.values() if grad.numel()), default=0.0)
    if not all(map(math.isfinite, (largest, *(float(square.sum()) for square in squares.values())))):
        return None  # the update will be skipped
    agree = _Agreement(largest, is_half)
    failing = {param for param, grad in grads.items() if not agree(sums.get(param), grad, squares.get(param))}
    of_terms = constant([param for param in failing if param in sums and bool(sums[param].any())])
    return failing - {p for p, own in of_terms.items() if agree(sums[p] + own, grads[p], squares.get(p))}


class _Agreement:
    """Whether Σ_i c_i is the gradient up to rounding; `largest` is the largest gradient of all parameters."""

    def __init__(self, largest: float, is_half: bool) -> None:
        self.largest, self.is_half = largest, is_half

    def __call__(self, total: Tensor | None, grad: Tensor, square: Tensor | None) -> bool:
        if total is None or not grad.numel():
            return not bool(grad.any())
        is_double = grad.dtype == torch.float64
        tolerance = 5e-2 if self.is_half else 1e-6 if is_double else 2e-4 if grad.is_cpu else 5e-3
        size = float(grad.abs().max()) + (0.0 if square is None else float(square.max()) ** 0.5)
        # Gradients that are zero but for rounding, such as an attention key's bias, are measured by the largest of all.
        return float((total - grad.to(total.dtype)).abs().max()) <= tolerance * (size + 0.01 * self.largest)
