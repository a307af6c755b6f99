"""Forward hooks of a capture, and the record of the first call of the whole model, whose rows may be the examples."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_bayes.private_torch import tree_leaves


class ModelCall(NamedTuple):
    """A call of the whole model whose first input and first output have equally many rows."""

    rows: int
    edge: GradientEdge  # of the output


class Uncopied(partial[Any]):
    """A hook on a module, bound to the arguments of a capture, that does nothing in a copy of the module."""

    def __reduce__(self) -> Any:
        return partial, (_ignore,)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return


def model_call(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ModelCall | None:
    """The record of a call, if its first input and its first output have equally many rows."""
    first_input = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim()), None)
    first_output = next((v for v in tree_leaves(output) if isinstance(v, Tensor) and v.requires_grad), None)
    if first_input is None or first_output is None or first_input.shape[:1] != first_output.shape[:1]:
        return None
    return ModelCall(len(first_input), get_gradient_edge(first_output))
