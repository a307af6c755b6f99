"""The first call of a model as a whole, whose rows may be the examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature.example_probe import Whole
from lightning_bayes.private_torch import tree_leaves

if TYPE_CHECKING:
    from lightning_bayes.curvature.capture import Capture


class NoteWhole:
    """A forward hook that notes the first call with equally many rows in and out; a copy of the module notes nothing."""

    def __init__(self, captured: Capture) -> None:
        self.captured = captured

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the call, if it is one."""
        if torch.compiler.is_compiling() or self.captured.whole is not None or not torch.is_grad_enabled():
            return
        taken = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim()), None)
        given = next((v for v in tree_leaves(output) if isinstance(v, Tensor) and v.requires_grad), None)
        if taken is not None and given is not None and taken.shape[:1] == given.shape[:1]:
            self.captured.whole = Whole(len(taken), get_gradient_edge(given))

    def __reduce__(self) -> Any:
        return _NoteNothing, ()


class _NoteNothing:
    def __call__(self, *_: Any) -> None:
        return
