"""A forward hook that records the first call of the whole model, whose rows may be the examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_bayes.private_torch import tree_leaves

if TYPE_CHECKING:
    from lightning_bayes.curvature.capture import Capture


class ModelCall(NamedTuple):
    """A call of the whole model whose first input and first output have equally many rows."""

    rows: int
    edge: GradientEdge  # of the output


class ModelCallHook:
    """Records the first call with equally many input and output rows. In a copy of the module, it does nothing."""

    def __init__(self, captured: Capture) -> None:
        self.captured = captured

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the call if its first input and its first output have equally many rows."""
        if torch.compiler.is_compiling() or self.captured.model_call is not None or not torch.is_grad_enabled():
            return
        first_input = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim()), None)
        first_output = next((v for v in tree_leaves(output) if isinstance(v, Tensor) and v.requires_grad), None)
        if first_input is None or first_output is None or first_input.shape[:1] != first_output.shape[:1]:
            return
        self.captured.model_call = ModelCall(len(first_input), get_gradient_edge(first_output))

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    def __call__(self, *_: Any) -> None:
        return
