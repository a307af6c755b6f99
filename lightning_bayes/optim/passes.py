"""The passes of one update, and the measurement that they add up to.

The passes between two updates may be weight samples, micro-batches, or both. Each is weighted by its number of examples:

    ĝ = Σ_p n_p ĝ_p / Σ_p n_p        ĥ = Σ_p n_p ĥ_p / Σ_p n_p

so micro-batches under the same noise equal one large batch. Passes over the same batch have equal weights, so its examples
need not be counted (`NoisyOptimizer.measured_pass`). ĝ is stored in ``param.grad``, where gradient clipping expects it.
Under a GradScaler it stays scaled until the scaler divides. ĥ is never scaled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import BareCapture, Capture, Workspace

Curvature: TypeAlias = dict[Any, Tensor]  # by parameter, or by another key of its estimator

SMALL = 2**16  # elements; smaller tensors are concatenated before they are summed, to save kernel launches


@dataclass(frozen=True)
class FinishedPass:
    """A pass that has just ended. The weights are still its sample, and ``.grad`` is its gradient alone."""

    captured: Capture
    sample: int
    loss_scale: float
    means: Mapping[nn.Parameter, Tensor]

    @property
    def weight(self) -> int:
        """Weight in averages over passes: the number of examples, or 1 if they were not counted."""
        return self.captured.num_examples

    @property
    def num_examples(self) -> int:
        """Number of examples in the loss."""
        assert not isinstance(self.captured, BareCapture)
        return self.captured.num_examples

    def gradients(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Copies of ĝ, unscaled, for the parameters that backward reached."""
        factor = self.gradient_factor
        return {param: param.grad * factor for param in params if param.grad is not None}

    @property
    def gradient_factor(self) -> float:
        """Factor from ``.grad`` to the gradient of the mean loss."""
        return self.captured.gradient_factor() / self.loss_scale

    def add_to_gradient_(self, param: nn.Parameter, term: Tensor) -> None:
        """Add a term to ĝ of a parameter."""
        term.div_(self.gradient_factor)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.add_(term)

    def add_prior_at_sample_(self, param: nn.Parameter, prior: float | Tensor) -> None:
        """Add δ̃ (θ - μ) to ĝ of a sampled parameter."""
        if param in self.means:
            self.add_to_gradient_(param, (param.detach() - self.means[param]).mul_(prior))

    def squares(self) -> Curvature:
        """(1/n) Σ_i g_i², unscaled, for the parameters that the engine measured."""
        squares = self.captured.mean_curvature()
        if self.loss_scale != 1 and squares and not self.captured.has_taken_examples:
            torch._foreach_div_(list(squares.values()), self.loss_scale**2)
        return squares


@dataclass(frozen=True)
class Measurement:
    """Loss, gradient and curvature of one update, averaged over the examples of its passes.

    The record is immutable. A host that trains in several processes averages its tensors in place before the step.

    Attributes:
        loss: Mean loss, a scalar.
        grads: ĝ of every trained parameter.
        curvature: ĥ of every measured parameter; zero if backward did not reach it. Empty if the update measures none.
        num_examples: n; the number of passes if examples were not counted.
        num_samples: Number of weight samples.
        is_counted: Whether examples were counted.
    """

    loss: Tensor
    grads: Mapping[nn.Parameter, Tensor]
    curvature: Mapping[Hashable, Tensor]
    num_examples: float
    num_samples: int
    is_counted: bool = True

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


@dataclass
class OpenUpdate:
    """Running averages over the passes since the last update."""

    num_opened: int = 0
    samples: set[int] = field(default_factory=set)
    examples: float = 0.0
    curvature: Curvature = field(default_factory=dict)
    loss: Tensor | None = None
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    measured_shapes: Mapping[Hashable, Tensor] | None = None
    is_counted: bool = True
    is_only_batch: bool = False
    always_measures: bool = False
    is_discarded: bool = False
    is_averaged_by_host: bool = False
    final_curvature: Curvature | None = None

    def add(
        self,
        finished: FinishedPass,
        grads: Mapping[nn.Parameter, Tensor | None],
        curvature: Curvature,
    ) -> None:
        """Add a pass to the averages. Afterwards each ``param.grad`` is ĝ."""
        n = finished.weight
        weight = n / (self.examples + n)
        factor = finished.captured.gradient_factor()
        for param, before in grads.items():
            param.grad = _weighted_mean(before if self.examples else None, param.grad, weight, factor)
        for key in {**self.curvature, **curvature}:
            new = _weighted_mean(self.curvature.get(key), curvature.get(key), weight, 1.0)
            assert new is not None
            self.curvature[key] = new
        self.loss = _weighted_mean(self.loss, finished.captured.loss, weight, factor)
        self.examples += n
        self.samples.add(finished.sample)
        self.is_counted &= not isinstance(finished.captured, BareCapture)
        self.final_curvature = None

    def measurement(self, params: Iterable[nn.Parameter], curvature: Curvature, *, fill: bool) -> Measurement:
        """Build the measurement of all passes."""
        params = list(params)
        grads = dict(_filled_gradients(params) if fill else ((p, p.grad) for p in params if p.grad is not None))
        if self.loss is None:
            self.loss = torch.zeros((), device=params[0].device)
        return Measurement(self.loss, grads, curvature, self.examples, len(self.samples), self.is_counted)

    def clear(self, workspace: Workspace) -> None:
        """Discard all passes and return the memory of ĥ."""
        workspace.give_back(values for key, values in self.curvature.items() if isinstance(key, nn.Parameter))
        # In place: in manual optimization Lightning's wrapper copies the optimizer's attributes and must see the change.
        vars(self).update(vars(OpenUpdate()))


def _filled_gradients(params: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        yield param, param.grad


def _weighted_mean(old: Tensor | None, new: Tensor | None, weight: float, factor: float) -> Tensor | None:
    """(1-weight)·old + weight·factor·new; a missing tensor counts as zero."""
    if new is None:
        return None if old is None else old.mul_(1 - weight)
    if old is None:
        return new if factor * weight == 1 else new.mul_(factor * weight)
    return old.mul_(1 - weight).add_(new, alpha=factor * weight)
