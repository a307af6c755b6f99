"""A call of a module that can be repeated in backward, for modules without a rule of their own."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.example_inputs import ExampleInputs
from lightning_bayes.curvature.rules.pytree import differentiable
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
        workspace: Says how many examples are taken at once.

    Attributes:
        inputs: The arguments, taken apart.
        buffers: The module's buffers before the forward, by name.
        frozen: Parameters that replays take from here, not from the module.

    Raises:
        UnsupportedLayerError: If examples are packed.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: Workspace | None = None
    ) -> None:
        self.module, self.workspace = module, workspace or Workspace()
        self.inputs = ExampleInputs(module, args, kwargs)
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.frozen: dict[str, Tensor] = {}
        self._rng_state: list[Tensor] | None = None  # that of the forward, if the module draws noise
        self._outputs: list[Tensor] | None = None  # those of the forward, until they were checked

    @abstractmethod
    def forward(self, params: dict[str, Tensor], is_checked: Callable[[], bool] = lambda: True) -> Any:
        """Call the module as its owner would.

        Args:
            params: Detached parameters by name.
            is_checked: Whether calls like this one are known not to mix examples.

        Returns:
            The module's output.
        """

    @abstractmethod
    def gradient(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """The gradient of the whole call.

        Args:
            params: Detached parameters by name.
            grads: As in `per_example`.

        Returns:
            The gradient by parameter name.
        """

    @abstractmethod
    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], found: Sums) -> None:
        """Require what the contributions rest on.

        Args:
            params: Detached parameters by name.
            grads: Gradients with respect to the outputs, as in `per_example`.
            found: The result of `sums`.
        """

    @abstractmethod
    def _visit(
        self, params: dict[str, Tensor], grads: list[Tensor | None], visit: Callable[[PerExample], None]
    ) -> None:
        """Call `visit` with the contributions of some examples at a time, in order."""

    def replay(self, params: dict[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        """Call the module with the forward's buffers; return its floating-point outputs, flattened."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # the module may change them
        with without_trace(self.module):
            output = call_with(self.module, {**buffers, **self.frozen, **params}, *self.inputs.arguments(leaves))
        return differentiable(output)[0]

    def per_example(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> PerExample:
        """Every example's contribution to every parameter.

        Args:
            params: Detached parameters by name.
            grads: Gradient with respect to each floating-point output; None where nothing depends on it.

        Returns:
            Contributions by parameter name, ``[B, *shape]``.
        """
        parts: list[PerExample] = []
        self._visit(params, grads, parts.append)
        return {
            name: torch.cat([p.new_zeros(0, *p.shape), *(part[name] for part in parts)]) for name, p in params.items()
        }

    def sums(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> Sums:
        """Sums of contributions and of their squares, without ever holding all contributions.

        Args:
            params: Detached parameters by name.
            grads: As in `per_example`.

        Returns:
            Both sums by parameter name.
        """
        total: Sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in params.items()}

        def add(part: PerExample) -> None:
            for name, contribution in part.items():
                add_sums(total, name, contribution.clone())  # contributions may be views of one another

        self._visit(params, grads, add)
        return total

    def keep_for_check(self, outputs: list[Tensor]) -> None:
        """Keep the forward's outputs for `require_same`, unless they are rounded to half precision."""
        tensors = [*outputs, *self.module.parameters()]
        if not any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors):
            self._outputs = [output.detach() for output in outputs]

    def require_same(self, again: list[Tensor], used: list[int]) -> None:
        """Require the outputs `used` of the forward from a repeated call.

        Args:
            again: Those of the repeated call.
            used: Their numbers among the module's floating-point outputs.

        Raises:
            UnsupportedLayerError: If they differ.
        """
        kept, self._outputs = self._outputs, None
        if kept is not None and not all(map(are_close, (kept[i] for i in used), again)):
            raise UnsupportedLayerError(
                f"{type(self.module).__name__} has no rule of its own, and called again with the same inputs it returns "
                "something else: it keeps a state outside of its buffers. Hold the state in buffers, or change it outside "
                "of forward; or freeze the parameters of the module with requires_grad_(False)."
            )


def are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree except for rounding of their largest elements."""
    scale = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


@contextlib.contextmanager
def refused_by_name(module: nn.Module) -> Iterator[None]:
    """Name the module in torch's errors about single examples."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedLayerError(
            f"{type(module).__name__} has no rule of its own, and cannot be run for one example at a time: {error} Write a "
            "rule for it (see curvature/rules/linear.py), move the parameters that it holds itself into a small module, or "
            "freeze them with requires_grad_(False). Activation checkpointing belongs around such a module, not inside."
        ) from error
