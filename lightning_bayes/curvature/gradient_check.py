"""The check of a pass: the contributions of the examples add up to the gradient that autograd computes.

    Σ_i c_i + ∂L₀/∂θ = ∂L/∂θ        L₀: terms that depend on no example, such as a penalty on the weights

A backward pass that can run only once, as under ``checkpoint(..., use_reentrant=True)``, is checked as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.errors import UnsupportedLayerError, name_some

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
    agree = partial(_agree, largest=largest, is_half=is_half)
    failing = {param for param, grad in grads.items() if not agree(sums.get(param), grad, squares.get(param))}
    of_terms = constant([param for param in failing if param in sums and bool(sums[param].any())])
    return failing - {p for p, own in of_terms.items() if agree(sums[p] + own, grads[p], squares.get(p))}


@dataclass
class CheckedParameters:
    """The parameters that passes of one kind have checked. A gradient of exactly zero shows nothing."""

    passed: set[nn.Parameter] = field(default_factory=set)
    failing: set[nn.Parameter] = field(default_factory=set)

    def add(self, failing: set[nn.Parameter], squares: ByParameter, grads: ByParameter) -> None:
        """Add a check with these squares and gradients, and with the parameters that failed it."""
        self.failing |= failing
        shown = {p for p, grad in grads.items() if bool(grad.any()) or (p in squares and bool(squares[p].any()))}
        self.passed |= shown - failing


def rounds_products(tensor: Tensor) -> bool:
    """Whether products of tensors like this one may have a relative error of 1e-3, as in TF32 or bfloat16."""
    is_full = tensor.is_cpu and torch.get_float32_matmul_precision() == "highest"
    return tensor.dtype != torch.float64 and not is_full


class RunningCheck:
    """Adds up Σ_i c_i and the gradients of parameters in the backward pass of the pass itself."""

    def __init__(self, params: Iterable[nn.Parameter], is_counted: Callable[[], bool]) -> None:
        self.is_counted = is_counted  # whether the running backward accumulates gradients
        self.sums: ByParameter = {}
        self._grads: ByParameter = {}
        self.hooks = ExitStack()
        for param in params:
            hook = param.register_hook(partial(self._add, self._grads, param))  # type: ignore[no-untyped-call]
            self.hooks.callback(hook.remove)

    def add(self, param: nn.Parameter, total: Tensor) -> None:
        """Add Σ_i c_i of one call."""
        self._add(self.sums, param, total)

    def passes(self, named: dict[str, nn.Parameter], squares: ByParameter, is_half: bool) -> bool:
        """End the check. False if a number is not finite; refuse parameters that fail (`failing_parameters`) by name."""
        self.hooks.close()
        failing = failing_parameters(self.sums, squares, self._grads, lambda params: {}, is_half)
        if failing:
            names = [name for name, param in named.items() if param in failing]
            raise UnsupportedLayerError(
                f"{name_some(names, 160)}: the contributions of the examples do not add up to the gradient. A term of the "
                "loss, or a use outside of the layer's forward, adds to it. Which of them is unknown, because a backward "
                "under checkpoint(..., use_reentrant=True) can run only once. Pass use_reentrant=False."
            )
        return failing is not None

    def _add(self, values: ByParameter, param: nn.Parameter, value: Tensor) -> None:
        if self.is_counted():
            values[param] = values[param] + value if param in values else value.detach()


def _agree(total: Tensor | None, grad: Tensor, square: Tensor | None, *, largest: float, is_half: bool) -> bool:
    """Whether Σ_i c_i is the gradient up to rounding; `largest` is the largest gradient of all parameters."""
    if total is None or not grad.numel():
        return not bool(grad.any())
    is_double = grad.dtype == torch.float64
    tolerance = 5e-2 if is_half else 1e-6 if is_double else 5e-3 if rounds_products(grad) else 2e-4
    size = float(grad.abs().max()) + (0.0 if square is None else float(square.max()) ** 0.5)
    # Gradients that are zero but for rounding, such as an attention key's bias, are measured by the largest of all.
    return float((total - grad.to(total.dtype)).abs().max()) <= tolerance * (size + 0.01 * largest)
