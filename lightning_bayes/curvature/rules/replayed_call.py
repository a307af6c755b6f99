"""A module call that can be repeated in the backward pass, for modules without a curvature rule."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.example_inputs import ExampleInputs
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums, add_sums
from lightning_bayes.curvature.rules.stateless import call_with, without_trace
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import UnsupportedLayerError

_HALF = {torch.float16, torch.bfloat16}


class ReplayedCall(ABC):
    """One call of a module, which can be repeated.

    Args:
        module: The module; it is called with detached parameters.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        workspace: Limits the number of examples processed at once.

    Attributes:
        inputs: The arguments, split into leaves.
        buffers: The module's buffers before the forward, by name.
        frozen: Parameters by name that replays use instead of the module's.

    Raises:
        UnsupportedLayerError: If the inputs are packed sequences.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: Workspace | None = None
    ) -> None:
        self.module, self.workspace = module, workspace or Workspace()
        self.inputs = ExampleInputs(module, args, kwargs)
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.frozen: dict[str, Tensor] = {}
        self._rng_state: list[Tensor] | None = None  # at the start of the forward, if the module draws noise
        self._outputs: list[Tensor] | None = None  # of the forward, until they are checked

    @abstractmethod
    def forward(self, params: dict[str, Tensor], is_checked: Callable[[], bool] = lambda: True) -> Any:
        """Return the module's output for the original call. `is_checked` returns whether such calls passed `check_sum`."""

    def gradient(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """The gradient of the call for the whole batch, by parameter name; arguments as in `per_example`."""
        indices, cotangents = used_outputs(grads)
        gradient: dict[str, Tensor] = self.vjp(params, indices)[1](cotangents)[0]
        return gradient

    @abstractmethod
    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], sums: Sums) -> None:
        """Check the assumptions behind the contributions; `sums` is the result of `ReplayedCall.sums`."""

    @abstractmethod
    def _visit(
        self, params: dict[str, Tensor], grads: list[Tensor | None], visit: Callable[[PerExample], None]
    ) -> None:
        """Call `visit` with the contributions of successive groups of examples."""

    def replay(self, params: dict[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        """Call the module with the buffers of the forward; return the flat list of its floating-point outputs."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # the call may change them
        with without_trace(self.module):
            output = call_with(self.module, {**buffers, **self.frozen, **params}, *self.inputs.arguments(leaves))
        return differentiable(output)[0]

    def vjp(self, params: dict[str, Tensor], indices: list[int]) -> tuple[list[Tensor], Callable[..., Any]]:
        """Repeat the call for the whole batch; return the outputs with these indices and their pull-back."""

        def outputs(replaced: dict[str, Tensor]) -> list[Tensor]:
            replayed = with_rng(self._rng_state, self.replay, replaced, self.inputs.leaves)
            return [replayed[i] for i in indices]

        repeated, pull_back, *_ = torch.func.vjp(outputs, params)
        return repeated, pull_back

    def per_example(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> PerExample:
        """The contribution of each example to the gradient of each parameter.

        Args:
            params: Detached parameters by name.
            grads: Gradient with respect to each floating-point output; None for an unused output.

        Returns:
            Contributions by parameter name, ``[B, *shape]``.
        """
        parts: list[PerExample] = []
        self._visit(params, grads, parts.append)
        return {
            name: torch.cat([p.new_zeros(0, *p.shape), *(part[name] for part in parts)]) for name, p in params.items()
        }

    def sums(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> Sums:
        """Sums of contributions and of their squares, without storing all contributions; see `per_example`."""
        total: Sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in params.items()}

        def add(part: PerExample) -> None:
            for name, contribution in part.items():
                add_sums(total, name, contribution.clone())  # contributions may share memory

        self._visit(params, grads, add)
        return total

    def keep_for_check(self, outputs: list[Tensor]) -> None:
        """Store the outputs of the forward for `require_same`, unless they are rounded to half precision."""
        tensors = [*outputs, *self.module.parameters()]
        if not any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors):
            self._outputs = [output.detach() for output in outputs]

    def require_same(self, repeated: list[Tensor], indices: list[int]) -> None:
        """Raise `UnsupportedLayerError` if the outputs of a repeated call differ from the outputs of the forward."""
        outputs, self._outputs = self._outputs, None
        if outputs is not None and not all(map(are_close, (outputs[i] for i in indices), repeated)):
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no curvature rule, and a second call with the same inputs returns a "
                "different output: it has state outside of its buffers. Store the state in buffers, change it outside of "
                "forward, or freeze the parameters of the module with requires_grad_(False)."
            )


def used_outputs(grads: list[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    """Indices and gradients of the outputs that have a gradient."""
    indices = [i for i, grad in enumerate(grads) if grad is not None]
    return indices, [grad for grad in grads if grad is not None]


def are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree up to rounding relative to the largest element."""
    scale = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


@contextlib.contextmanager
def refused_by_name(module: nn.Module) -> Iterator[None]:
    """Convert torch's errors about single examples to an error that names the module."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedLayerError(
            f"{type(module).__name__} has no curvature rule and cannot run one example at a time: {error} Write a rule for "
            "it (see curvature/rules/linear.py), move its own parameters into a small module, or freeze them with "
            "requires_grad_(False). Apply activation checkpointing around such a module, not inside."
        ) from error
