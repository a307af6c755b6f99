"""A module call that can be repeated in the backward pass, for modules without a curvature rule."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.example_inputs import ExampleInputs
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums, add_sums
from lightning_bayes.curvature.rules.stateless import call_with, without_trace
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import BayesError, UnsupportedLayerError

Checked: TypeAlias = set[tuple[nn.Module, tuple[int | None, ...]]]  # modules, example dimensions of their inputs

_HALF = {torch.float16, torch.bfloat16}


@dataclass(eq=False)
class ReplayedCall(ABC):
    """One call of a module, which can be repeated."""

    module: nn.Module
    inputs: ExampleInputs
    params: dict[str, Tensor]  # detached, by name; calls use them instead of the module's
    measured_names: list[str]  # of the parameters to measure
    workspace: Workspace  # limits the number of examples processed at once
    checked: Checked  # calls that need no check; a call that passes its check is added
    buffers: dict[str, Tensor]  # before the forward
    _rng_state: list[Tensor] | None  # before the forward, if the module draws noise
    _outputs: list[Tensor] | None = field(default=None, init=False)  # of the forward, until they are checked
    _buffers_after: dict[str, Tensor] = field(default_factory=dict, init=False)  # the forward, until they are checked

    def keep_for_check(self, outputs: list[Tensor]) -> None:
        """Store what the check of the first call needs: the outputs, unless they are rounded to half precision."""
        if self._is_checked:
            return
        self.params = {
            name: param.clone() for name, param in self.params.items()
        }  # an unknown module may write to them
        self._buffers_after = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        tensors = [*outputs, *self.module.parameters()]
        if not any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors):
            self._outputs = [output.detach().clone() for output in outputs]

    def from_either_state(self, function: Callable[[list[Tensor | None]], Any], grads: list[Tensor | None]) -> Any:
        """The result of `function` with the buffers before the forward; if they fail the check, with those after it."""
        try:
            return function(grads)
        except BayesError:
            before, after = self.buffers, self._buffers_after
            if all(torch.equal(before[name], buffer) for name, buffer in after.items() if name in before):
                raise
            self.buffers, self._buffers_after = after, {}  # the first call of a module that initialises itself
            return function(grads)

    def per_example(self, grads: list[Tensor | None]) -> PerExample:
        """The contribution of each example to the gradient of each parameter."""
        parts: list[PerExample] = with_rng(self._rng_state, list, self._parts(grads))
        contributions = {
            name: torch.cat([p.new_zeros(0, *p.shape), *(part[name] for part in parts)])
            for name, p in self.measured.items()
        }
        if not self._is_checked:
            self._check(grads, {name: (c.sum(0), c.square().sum(0)) for name, c in contributions.items()})
        return contributions

    def sums(self, grads: list[Tensor | None]) -> Sums:
        """Sums of contributions and of their squares, without storing all contributions; see `per_example`."""
        total: Sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.measured.items()}

        def add_parts() -> None:
            for part in self._parts(grads):
                for name, contribution in part.items():
                    add_sums(total, name, contribution.clone())  # contributions may share memory

        with_rng(self._rng_state, add_parts)
        if not self._is_checked:
            self._check(grads, total)
        return total

    @property
    def measured(self) -> dict[str, Tensor]:
        """The parameters to measure."""
        return {name: self.params[name] for name in self.measured_names}

    @abstractmethod
    def _parts(self, grads: list[Tensor | None]) -> Iterator[PerExample]:
        """Yield the contributions of successive groups of examples; runs with the random numbers of the forward."""

    def _replay(self, leaves: list[Any], params: dict[str, Tensor] | None = None) -> list[Tensor]:
        """Call the module with the buffers of the forward; return the flat list of its floating-point outputs."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # the call may change them
        tensors = {**buffers, **self.params, **(params or {})}
        with without_trace(self.module):
            output = call_with(self.module, tensors, *self.inputs.arguments(leaves))
        return differentiable(output)[0]

    def _vjp(self, indices: list[int]) -> tuple[list[Tensor], Callable[..., Any]]:
        """Repeat the call for the whole batch; return the outputs with these indices and their pull-back."""

        def outputs(params: dict[str, Tensor]) -> list[Tensor]:
            repeated = with_rng(self._rng_state, self._replay, self.inputs.leaves, params)
            return [repeated[i] for i in indices]

        repeated, pull_back, *_ = torch.func.vjp(outputs, self.measured)
        return repeated, pull_back

    # -- the check of the first call ----------------------------------------------------------------------------------

    @property
    def _is_checked(self) -> bool:
        """Whether a call with the same way of splitting the inputs passed the check."""
        return (self.module, self.inputs.dims) in self.checked

    def _check(self, grads: list[Tensor | None], sums: Sums) -> None:
        """Check the assumptions behind the contributions; `sums` is the result of `ReplayedCall.sums`."""
        if not all(grad.isfinite().all() for grad, _ in sums.values()):
            return
        self._check_sum(grads, sums)
        if self.inputs.batch_size > 1:  # a single example cannot show mixing
            self.checked.add((self.module, self.inputs.dims))
            self._outputs, self._buffers_after = None, {}

    def _check_sum(self, grads: list[Tensor | None], sums: Sums) -> dict[str, Tensor]:
        """Require that a repeated call returns the same outputs; return the batch gradient."""
        indices, cotangents = used_outputs(grads)
        repeated, pull_back = self._vjp(indices)
        outputs = self._outputs
        if outputs is not None and not all(map(are_close, (outputs[i] for i in indices), repeated)):
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no curvature rule, and a second call with the same inputs returns a "
                "different output: it has state outside of its buffers. Store the state in buffers, change it outside of "
                "forward, or freeze the parameters of the module with requires_grad_(False)."
            )
        gradient: dict[str, Tensor] = pull_back(cotangents)[0]
        return gradient


def used_outputs(grads: list[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    """Indices and gradients of the outputs that have a gradient."""
    indices = [i for i, grad in enumerate(grads) if grad is not None]
    return indices, [grad for grad in grads if grad is not None]


def are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree up to rounding relative to the largest element."""
    scale = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def in_parts(
    function: Callable[..., PerExample],
    select: Callable[[int, int], list[Any]],
    in_dims: Sequence[int | None],
    num_examples: int,
    size: int,
) -> Iterator[PerExample]:
    """Yield the contributions of `size` examples at a time by `torch.vmap`, or of one if `torch.vmap` fails."""
    start = 0
    with suppress(RuntimeError):  # recurrent layers, for example, have no batching rule
        while size and start < num_examples:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # correct, only slow
                part: PerExample = torch.vmap(function, tuple(in_dims))(*select(start, min(size, num_examples - start)))
            yield part
            start += size
    for i in range(start, num_examples):
        pairs = zip(select(i, 1), in_dims, strict=True)
        contributions = function(*(value if dim is None else value.select(dim, 0) for value, dim in pairs))
        yield {name: value.unsqueeze(0) for name, value in contributions.items()}
