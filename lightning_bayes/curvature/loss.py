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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.loss_examples import (
    counted_examples,
    counted_targets,
    num_counted,
    require_all_examples,
)
from lightning_bayes.curvature.loss_terms import (
    Term,
    below_reductions,
    data_terms,
    name_of,
    over_examples,
    sizes_of,
    terms_of,
)
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError

LossReduction: TypeAlias = Literal["auto", "mean", "sum"]

_REDUCTION_CODES = {1: "mean", 2: "sum"}  # at::Reduction


@dataclass
class LossScale:
    """How one pass reduced its examples.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``.
        counted: One boolean tensor per loss term that ignores targets: which count, examples first. Empty if all do.
    """

    reduction: str = "mean"
    counted: list[Tensor] = field(default_factory=list)
    _found: dict[int, int] = field(default_factory=dict, repr=False, compare=False)  # n by batch size

    def num_examples(self, batch_size: int) -> int:
        """Number of examples that count, n.

        Args:
            batch_size: Number of examples that the layers saw.

        Returns:
            n, at least 1.
        """
        if batch_size not in self._found:
            self._found[batch_size] = num_counted(self.counted, batch_size)
        return self._found[batch_size]


def read_loss_scale(
    loss: Tensor, reduction: LossReduction = "auto", divided_by_host: bool = False, batch_size: int | None = None
) -> LossScale:
    """Read how `loss` reduced its examples.

    Known are PyTorch's own loss functions (each stores its reduction), means and sums over the examples. A sum that is
    divided by the number of examples, or by a multiple of it such as the number of tokens, is a mean. Terms that no example
    enters, such as a penalty on the weights, do not count. Of a function of a mean, such as its root, each example has its
    share of the gradient. A loss in compiled code shows nothing, and is taken for a mean.

    Terms that are reduced in different ways, over other examples than the layers saw, rescaled so that they may be either,
    or reduced by what is neither a mean nor a sum are refused by an `UnsupportedTrainingError`.

    Args:
        loss: Scalar with a graph, before `backward`.
        reduction: ``"auto"`` reads the graph; ``"mean"`` and ``"sum"`` declare it.
        divided_by_host: Whether to overlook a last division, which the training loop added.
        batch_size: Number of examples that the layers saw; None if it is not known.

    Returns:
        The scale of this loss.

    Raises:
        ShapeError: If `loss` is not a scalar.
    """
    if loss.numel() != 1:
        raise ShapeError(f"The loss has shape {tuple(loss.shape)}; backward needs a scalar. Reduce it with .mean().")
    root: Any = loss.grad_fn
    if divided_by_host and root is not None:
        root = root.next_functions[0][0]
    terms = data_terms(root)
    for term in terms:
        require_all_examples(term, batch_size)
    counted = counted_examples(terms, batch_size)
    return LossScale(reduction if reduction != "auto" else _common_reduction(terms, batch_size), counted)


def _common_reduction(terms: list[Term], batch_size: int | None) -> str:
    kinds = [_reduction(term, batch_size) for term in terms]
    found = {kind for kind in kinds if kind in {"mean", "sum"}}
    if len(found) > 1:
        raise UnsupportedTrainingError(
            "The loss adds a term reduced by 'sum' to one reduced by 'mean', so its examples have no common scale. "
            "Use one reduction for the examples; if the sum is a penalty on the weights, declare loss_reduction='mean'."
        )
    unclear = next((kind for kind in kinds if kind not in {"mean", "sum", None}), None)
    if unclear and not found:
        raise UnsupportedTrainingError(
            f"The loss {unclear} in a batch of {batch_size} examples, so it may be a mean or a sum over them. Pass "
            "loss_reduction='mean' or 'sum', or take the examples' .mean()."
        )
    return found.pop() if found else "mean"


def loss_functions(loss: Tensor) -> set[str]:
    """Names of PyTorch's loss functions in a loss, as its autograd graph has them.

    Args:
        loss: Scalar with a graph.

    Returns:
        Names such as ``"MseLoss"``, ``"NllLoss"`` or ``"BinaryCrossEntropyWithLogits"``.

    Example:
        >>> import torch
        >>> a = torch.zeros(2, requires_grad=True)
        >>> loss_functions(torch.nn.functional.mse_loss(a, torch.ones(2)))
        {'MseLoss'}
    """
    terms = [term.node for term in terms_of(loss.grad_fn)]
    nodes = [*terms, *(below for node in terms for below in below_reductions(node))]
    return {name_of(node) for node in nodes if hasattr(node, "_saved_reduction")}


def _reduction(term: Term, batch_size: int | None) -> str | None:
    """``"mean"``, ``"sum"``, None if nothing tells, or what the loss is instead that may be either."""
    node = over_examples(term.node, batch_size)
    kind = _kind(node) if term.is_readable else None
    if term.is_compiled or (term.is_readable and kind is None):
        return None
    if kind == "mean":
        is_undone = batch_size is not None and batch_size > 2 and any(_is_int(m, batch_size) for m in term.multipliers)
        return f"is a mean rescaled by {batch_size}" if is_undone else kind
    divisor = math.prod(float(d) for d in term.divisors)
    if divisor != 1:
        counted = counted_targets(node)
        is_count = batch_size is None or divisor % batch_size == 0 or (counted is not None and divisor == counted.sum())
        return "mean" if is_count else f"is a sum rescaled by 1/{divisor:g}"
    return _undivided(term, node, batch_size) if batch_size is not None and batch_size > 1 else kind


def _kind(node: Any) -> str | None:
    if hasattr(node, "_saved_reduction"):
        return _REDUCTION_CODES.get(node._saved_reduction)
    return "mean" if name_of(node) == "Mean" else "sum"


def _is_int(factor: Any, value: int) -> bool:
    """Whether a factor is written as this integer, such as ``len(x)``; the scale of a `GradScaler` is not."""
    is_float = factor.is_floating_point() if isinstance(factor, Tensor) else isinstance(factor, float)
    return not is_float and bool(factor == value)


def _undivided(term: Term, node: Any, batch_size: int) -> str:
    """``"sum"``, or what the loss is instead."""
    if not term.is_readable:
        return f"reduces its values by {name_of(term.node)}"
    if term.bent_by:
        return f"is the {term.bent_by[0]} of a sum"
    largest = max(math.prod(sizes_of(found)) for found in (node, *below_reductions(term.node)))
    inverse = next((m for m in map(float, term.multipliers) if _divides_by_count(m, batch_size, largest)), None)
    return "sum" if inverse is None else f"is a sum rescaled by {inverse:g}"


def _divides_by_count(factor: float, batch_size: int, num_values: int) -> bool:
    """Whether a factor is one over the number of examples, or of their values; a half is a half."""
    count = round(1 / abs(factor)) if factor else 0
    is_count = count > 2 and count % batch_size == 0 and num_values % count == 0
    return is_count and math.isclose(count * abs(factor), 1, rel_tol=1e-5)


class BackwardWatch(TorchFunctionMode):
    """Calls `observe(loss)` before each ``loss.backward()``, for code that hands the loss to nobody else."""

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._observe(args[0])
        return func(*args, **(kwargs or {}))
