"""How a scalar loss adds up its examples, read from its autograd graph.

Backward through a batch loss L gives every example's *contribution* c_i to the gradient. To turn contributions into
per-example gradients g_i one must know what L did:

    reduction="mean":  L = (1/n) Σ ℓ_i    →    g_i = n c_i        mean_i g_i² = n   Σ c_i²
    reduction="sum":   L =       Σ ℓ_i    →    g_i =   c_i        mean_i g_i² = 1/n Σ c_i²

with n the number of examples that count (an example whose targets are all `ignore_index` does not). PyTorch's loss
functions record their reduction and targets in the graph, so nothing has to be declared for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.errors import ShapeError, UnsupportedTrainingError

LossReduction: TypeAlias = Literal["auto", "mean", "sum"]

_REDUCING = ("MeanBackward", "SumBackward")
_ARITHMETIC = ("AddBackward", "SubBackward", "MulBackward", "DivBackward", "NegBackward")
_REDUCTION_CODES = {1: "mean", 2: "sum"}  # at::Reduction


@dataclass
class LossScale:
    """How one pass reduced its examples.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``.
        counted: One boolean vector per loss term that ignores targets: which entries count. Empty if all do.
    """

    reduction: str = "mean"
    counted: list[Tensor] = field(default_factory=list)

    def num_examples(self, batch_size: int) -> int:
        """Number of examples that count, n.

        Args:
            batch_size: Number of examples that the layers saw.

        Returns:
            n, at least 1.
        """
        rows = [_examples_that_count(mask, batch_size) for mask in self.counted]
        if not rows:
            return batch_size
        return max(1, int(torch.stack(rows).any(0).sum()))


def _examples_that_count(mask: Tensor, batch_size: int) -> Tensor:
    if mask.numel() % batch_size:  # targets that do not divide into examples cannot ignore one
        return torch.ones(batch_size, dtype=torch.bool, device=mask.device)
    return mask.reshape(batch_size, -1).any(1)  # [B·T] or [B, T]: an example counts if one of its targets does


def read_loss_scale(loss: Tensor, reduction: LossReduction = "auto", divided_by_host: bool = False) -> LossScale:
    """Read how `loss` reduced its examples.

    Known are PyTorch's own loss functions (each stores its reduction), a final ``.mean()``, and a final ``.sum()``
    that nothing divides; a sum that is divided counts as a mean.

    Args:
        loss: Scalar with a graph, before `backward`.
        reduction: ``"auto"`` reads the graph; ``"mean"`` and ``"sum"`` declare it.
        divided_by_host: Whether to overlook a last division, which the training loop added.

    Returns:
        The scale of this loss.

    Raises:
        ShapeError: If `loss` is not a scalar.
        UnsupportedTrainingError: If terms of the loss are reduced differently.
    """
    if loss.numel() != 1:
        raise ShapeError(f"The loss has shape {tuple(loss.shape)}; backward needs a scalar. Reduce it with .mean().")
    root: Any = loss.grad_fn
    if divided_by_host and root is not None:
        root = root.next_functions[0][0]
    terms = list(_terms(root))
    scale = LossScale(counted=[mask for node, _ in terms if (mask := _counted(node)) is not None])
    if reduction != "auto":
        scale.reduction = reduction
        return scale
    found = {kind for node, divided in terms if (kind := _reduction(node, divided)) is not None}
    if len(found) > 1:
        raise UnsupportedTrainingError(
            "The loss adds a term reduced by 'sum' to one reduced by 'mean', so its examples have no common scale. "
            "Use one reduction for the examples; if the sum is a penalty on the weights, declare loss_reduction='mean'."
        )
    scale.reduction = found.pop() if found else "mean"
    return scale


def loss_functions(loss: Tensor) -> set[str]:
    """Names of PyTorch's loss functions in a loss, as its autograd graph has them.

    Args:
        loss: Scalar with a graph.

    Returns:
        Names such as ``"MseLoss"``, ``"NllLoss"`` or ``"BinaryCrossEntropyWithLogits"``.

    Example:
        >>> a = torch.zeros(2, requires_grad=True)
        >>> loss_functions(torch.nn.functional.mse_loss(a, torch.ones(2)))
        {'MseLoss'}
    """
    terms = [node for node, _ in _terms(loss.grad_fn)]
    nodes = [*terms, *(below for node in terms for below in _below(node, _ARITHMETIC + _REDUCING))]
    return {node.name().split("Backward")[0] for node in nodes if hasattr(node, "_saved_reduction")}


def _terms(root: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the nodes that reduce examples to a scalar, and whether their result was divided afterwards."""
    stack, seen = [(root, False)], set()
    while stack:
        node, divided = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        parts = _stacked_scalars(node)
        if parts:  # tasks' losses put together, each reduced on its own
            stack += [(part, divided) for part in parts]
        elif hasattr(node, "_saved_reduction") or node.name().startswith(_REDUCING):
            yield node, divided
        elif _is_scalar(node):
            divided = divided or node.name().startswith("DivBackward")
            stack += [(parent, divided) for parent, _ in node.next_functions]


def _stacked_scalars(node: Any) -> list[Any]:
    """The scalars that ``torch.stack([a, b]).sum()`` adds, with any weights in between; empty for other nodes."""
    if not node.name().startswith(_REDUCING):
        return []
    if math.prod(node._saved_self_sym_sizes) == 1:  # the sum of one number
        return _parents(node)
    for found in _below(node, _ARITHMETIC):
        if found.name().startswith(("StackBackward", "CatBackward")):
            parts = _parents(found)
            return parts if parts and all(map(_is_scalar, parts)) else []
    return []


def _below(node: Any, through: tuple[str, ...]) -> Iterator[Any]:
    """Yield what `node` was computed from, and what that was computed from if its name begins as one of `through`."""
    stack = _parents(node)
    while stack:
        found = stack.pop()
        yield found
        if found.name().startswith(through):
            stack += _parents(found)


def _parents(node: Any) -> list[Any]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _is_scalar(node: Any) -> bool:
    return all(math.prod(meta.shape) == 1 for meta in node._input_metadata)


def _reduction(node: Any, divided: bool) -> str | None:
    if hasattr(node, "_saved_reduction"):
        return _REDUCTION_CODES.get(node._saved_reduction)
    return "sum" if node.name().startswith("SumBackward") and not divided else "mean"


def _counted(node: Any) -> Tensor | None:
    if not hasattr(node, "_saved_ignore_index"):
        return None
    counted: Tensor = node._saved_target != node._saved_ignore_index
    return counted


class BackwardWatch(TorchFunctionMode):
    """Calls `observe(loss)` before each ``loss.backward()``, for code that hands the loss to nobody else."""

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._observe(args[0])
        return func(*args, **(kwargs or {}))
