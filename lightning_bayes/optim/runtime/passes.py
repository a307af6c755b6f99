"""Passes of one update: what a single pass leaves behind, and what all of them measured together.

Passes between two updates may be samples of the weights, micro-batches, or both. Each counts by its number of examples:

    ĝ = Σ_p n_p ĝ_p / Σ_p n_p        ĥ = Σ_p n_p ĥ_p / Σ_p n_p

so micro-batches under the same noise equal one large batch. Passes over the same batch have the same weight, and its
examples need not be counted (`NoisyOptimizer.measured_pass`). ĝ lives in ``param.grad``, where clipping finds it; under a
GradScaler it is scaled there until the scaler divides. ĥ is never scaled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import BareCapture, Capture, Workspace
from lightning_bayes.curvature.spread import local

Curvature: TypeAlias = dict[Any, Tensor]  # by parameter, or by whatever key its estimator chooses

SMALL = 2**16  # elements; smaller tensors are joined before they are added up, for each call costs as much


@dataclass(frozen=True)
class FinishedPass:
    """A pass that has just ended: the weights are still its sample, and ``.grad`` is its own gradient.

    Attributes:
        captured: The engine's capture of the pass.
        sample: Number of the weight sample.
        loss_scale: Factor on the loss, such as a GradScaler's.
        means: μ of the parameters under noise.
        processes: Number of processes over whose batches the gradient is averaged already.
    """

    captured: Capture
    sample: int
    loss_scale: float
    means: Mapping[nn.Parameter, Tensor]
    processes: int = 1

    @property
    def num_examples(self) -> int:
        """Number of examples that counted in the loss."""
        return self.captured.num_examples * self.processes

    def gradients(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """ĝ of the parameters that backward reached, unscaled, in memory of its own."""
        factor = self.gradient_factor
        return {param: local(param.grad) * factor for param in params if param.grad is not None}

    @property
    def gradient_factor(self) -> float:
        """Factor from ``.grad`` to the gradient of the mean loss."""
        return self.captured.gradient_factor() / self.loss_scale

    def add_to_gradient_(self, param: nn.Parameter, term: Tensor) -> None:
        """Add a term to ĝ of a parameter.

        Args:
            param: The parameter.
            term: The term, unscaled; it may be overwritten.
        """
        term.div_(self.gradient_factor)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        local(param.grad).add_(term)

    def add_prior_of_noise_(self, param: nn.Parameter, prior: float | Tensor) -> None:
        """Add δ̃ (θ - μ) to ĝ of a parameter under noise: with the step's δ̃ μ it is the prior's gradient at the sample.

        Args:
            param: The parameter.
            prior: δ̃, or that of each weight.
        """
        if param in self.means:
            self.add_to_gradient_(param, (local(param).detach() - self.means[param]).mul_(prior))

    def squares(self) -> Curvature:
        """(1/n) Σ_i g_i² of the parameters that the engine measured, unscaled."""
        squares = self.captured.mean_curvature()
        if self.loss_scale != 1 and squares and not self.captured.has_taken_examples:
            torch._foreach_div_(list(squares.values()), self.loss_scale**2)
        return squares


@dataclass(frozen=True)
class Measurement:
    """The measurement of one update's passes, as means over their examples.

    The record does not change; a host that trains in several processes averages its tensors in place before the step.

    Attributes:
        loss: Mean loss, a scalar.
        grads: ĝ of every trained parameter.
        curvature: ĥ, complete: zeros where nothing was measured. Empty in an update that measures no curvature.
        num_examples: n; the number of passes where the examples were not counted.
        num_samples: Number of weight samples.
        is_counted: Whether examples were counted.
    """

    loss: Tensor
    grads: Mapping[nn.Parameter, Tensor]
    curvature: Mapping[Hashable, Tensor]
    num_examples: float
    num_samples: int
    is_counted: bool = True

    @property
    def has_curvature(self) -> bool:
        """Whether the update measured the curvature, see `optim.runtime.measuring`."""
        return bool(self.curvature)

    def tensors(self) -> list[Tensor]:
        """Loss, ĝ and, where it was measured, ĥ, in an order that all processes share."""
        return [self.loss, *self.grads.values(), *self.curvature.values()]

    def is_finite(self) -> bool:
        """Whether every number is finite."""
        tensors = [local(tensor) for tensor in self.tensors()]
        if all(tensor.is_cpu for tensor in tensors):  # a number costs nothing there; a copy of the small ones does
            return all(math.isfinite(tensor.sum().item()) for tensor in tensors)
        small = [t.reshape(-1) for t in tensors if t.numel() <= SMALL]
        large = [t for t in tensors if t.numel() > SMALL]
        return all(map(math.isfinite, torch.stack([t.sum() for t in (torch.cat(small), *large)]).tolist()))


@dataclass
class OpenUpdate:
    """The passes since the last update, averaged as they come.

    Attributes:
        opened: Number of passes opened.
        samples: Numbers of the weight samples.
        examples: Σ_p n_p.
        curvature: Mean ĥ so far, by the estimator's keys.
        loss: Mean loss so far; None before the first pass that showed its loss.
        buffers: The model's buffers as they were before the first pass.
        measures: Whether its passes measure the curvature; None before the first.
        is_counted: Whether the examples of all passes were counted.
        is_only_batch: Whether all of its passes are over one batch.
        is_discarded: Whether the next step does nothing.
        is_averaged_by_host: Whether a host averages the measurement over processes.
        measurement: The measurement, once it is final.
    """

    opened: int = 0
    samples: set[int] = field(default_factory=set)
    examples: float = 0.0
    curvature: Curvature = field(default_factory=dict)
    loss: Tensor | None = None
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    measures: bool | None = None
    is_counted: bool = True
    is_only_batch: bool = False
    is_discarded: bool = False
    is_averaged_by_host: bool = False
    measurement: Measurement | None = None

    def add(
        self,
        finished: FinishedPass,
        grads: Mapping[nn.Parameter, Tensor | None],
        curvature: Curvature,
    ) -> None:
        """Fold one pass in; afterwards each ``param.grad`` is ĝ.

        Args:
            finished: The pass; the parameters' ``.grad`` is its own gradient.
            grads: ĝ before this pass by parameter.
            curvature: ĥ of this pass.
        """
        n = finished.num_examples
        share = n / (self.examples + n)
        factor = finished.captured.gradient_factor()
        for param, before in grads.items():
            param.grad = _mean(before if self.examples else None, param.grad, share, factor)
        for key in {**self.curvature, **curvature}:
            new = _mean(self.curvature.get(key), curvature.get(key), share, 1.0)
            assert new is not None
            self.curvature[key] = new
        self.loss = _mean(self.loss, finished.captured.loss, share, factor)
        self.examples += n
        self.samples.add(finished.sample)
        self.is_counted &= not isinstance(finished.captured, BareCapture)
        self.measurement = None

    def finalise(self, params: Iterable[nn.Parameter], curvature: Curvature) -> Measurement:
        """Close the means; repeated calls return the same measurement, with the gradients as they are now.

        Args:
            params: The trained parameters, in an order that all processes share.
            curvature: ĥ, complete, in such an order.

        Returns:
            The measurement. Parameters that backward did not reach have zeros in ``.grad`` afterwards.
        """
        grads = dict(_filled_gradients(params))
        if self.loss is None:
            self.loss = torch.zeros((), device=next(iter(grads)).device)
        self.measurement = Measurement(self.loss, grads, curvature, self.examples, len(self.samples), self.is_counted)
        return self.measurement

    def clear(self, workspace: Workspace) -> None:
        """Forget all passes and give the memory of ĥ back.

        Args:
            workspace: The engine's.
        """
        workspace.give_back(values for key, values in self.curvature.items() if isinstance(key, nn.Parameter))
        # In place: Lightning's wrapper copies the optimizer's attributes in manual optimization, and both must see it.
        vars(self).update(vars(OpenUpdate()))


def zeros_where_missing(curvature: Curvature, shapes: Mapping[Hashable, Tensor]) -> Curvature:
    """Complete ĥ.

    Args:
        curvature: Means by key.
        shapes: By every key that must be there, in order, a tensor of its shape.

    Returns:
        The means, zeros where there is none.
    """
    return {key: curvature[key] if key in curvature else torch.zeros_like(local(like)) for key, like in shapes.items()}


def _filled_gradients(params: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        yield param, param.grad


def _mean(old: Tensor | None, new: Tensor | None, share: float, factor: float) -> Tensor | None:
    """(1-share)·old + share·factor·new, where a missing tensor is zero."""
    if new is None:
        return None if old is None else old.mul_(1 - share)
    if old is None:
        return new if factor * share == 1 else new.mul_(factor * share)  # a single pass is its own mean
    return old.mul_(1 - share).add_(new, alpha=factor * share)
