"""What a finished pass measured, from which a curvature estimator reads ĥ, and what the passes of an update add up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

Curvature: TypeAlias = dict[Any, Tensor]  # by parameter, or by another key of its estimator

SMALL = 2**16  # elements; smaller tensors are concatenated before they are summed, to save kernel launches


def rescaled(curvature: Curvature, factor: float, degree_of: Callable[[Any], int]) -> Curvature:
    """ĥ of a loss that is `factor` times as large; `degree_of` a key is the power of the loss it is proportional to."""
    return {key: value * factor ** degree_of(key) for key, value in curvature.items()}


@final
class BarePass:
    """Takes the place of a capture where nothing is measured: the pass has weight 1, and its loss is a mean."""

    loss: Tensor | None = None
    num_examples, gradient_factor = 1, 1.0
    squares: Mapping[nn.Parameter, Tensor] = {}
    paddings: Mapping[nn.Parameter, Any] = {}
    divisors: frozenset[int] = frozenset()

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Store the loss."""
        self.loss = loss.detach().clone()


@dataclass(frozen=True)
class FinishedPass:
    """A pass that has just ended. The weights are still its sample, and ``.grad`` is its gradient alone."""

    captured: Any  # a `Capture`, or a `BarePass`
    sample: int
    loss_scale: float
    means: Mapping[nn.Parameter, Tensor]

    def padding_rows(self) -> dict[nn.Parameter, int]:
        """The row of each table that all its look-ups took as padding, where it got no gradient by another use."""
        found = {p: i for p, (i, *others) in self.captured.paddings.items() if i is not None and not others}
        tables = [p for p in found if isinstance(p, nn.Parameter) and p.grad is not None]
        return {p: found[p] % len(p) for p in tables if not bool(p.grad[found[p]].any())}  # type: ignore[index]

    def gradients(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Copies of ĝ, unscaled, for the parameters that backward reached."""
        factor = self.gradient_factor
        return {param: param.grad * factor for param in params if param.grad is not None}

    @property
    def gradient_factor(self) -> float:
        """Factor from ``.grad`` to the gradient of the mean loss."""
        return float(self.captured.gradient_factor) / self.loss_scale

    def add_to_gradient_(self, param: nn.Parameter, term: Tensor) -> None:
        """Add a term to ĝ of a parameter."""
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.add_(term, alpha=1 / self.gradient_factor)


@final
@dataclass(frozen=True)
class UpdateMeasurement:
    """Loss, gradient and curvature of one update, averaged over the examples of its passes.

    The record is immutable. A host that trains in several processes averages its tensors in place before the step.
    """

    loss: Tensor  # mean loss, a scalar
    grads: Mapping[nn.Parameter, Tensor]  # ĝ of every trained parameter
    curvature: Mapping[Hashable, Tensor]  # ĥ, zero where backward did not reach; empty if none is measured
    num_examples: float  # n; the number of passes if examples were not counted
    num_samples: int  # number of weight samples
    is_counted: bool = True  # whether examples were counted
    summed: float = 1.0  # number of examples whose losses a pass adds up; 1 for a mean

    def tensors(self) -> list[Tensor]:
        """Loss, ĝ and, if measured, ĥ, in the same order in all processes."""
        return [self.loss, *self.grads.values(), *self.curvature.values()]

    def is_finite(self) -> bool:
        """Whether every number is finite."""
        tensors = self.tensors()
        if all(tensor.is_cpu for tensor in tensors):  # reading a number is free here, copying is not
            return all(math.isfinite(tensor.sum().item()) for tensor in tensors)
        small = [t.reshape(-1) for t in tensors if t.numel() <= SMALL]
        large = [t for t in tensors if t.numel() > SMALL]
        return all(map(math.isfinite, torch.stack([t.sum() for t in (torch.cat(small), *large)]).tolist()))
