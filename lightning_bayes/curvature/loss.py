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

from lightning_bayes.curvature.uses import enters_measured_layer
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError

LossReduction: TypeAlias = Literal["auto", "mean", "sum"]

_REDUCING = ("MeanBackward", "SumBackward")
_ARITHMETIC = ("AddBackward", "SubBackward", "MulBackward", "DivBackward", "NegBackward")
_SCALING = ("MulBackward", "DivBackward")
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


def read_loss_scale(
    loss: Tensor, reduction: LossReduction = "auto", divided_by_host: bool = False, batch_size: int | None = None
) -> LossScale:
    """Read how `loss` reduced its examples.

    Known are PyTorch's own loss functions (each stores its reduction), ``.mean()`` and ``.sum()`` over the examples. A sum
    that is divided by the number of examples, or by a multiple of it such as the number of tokens, is a mean. Terms that
    no example enters, such as a penalty on the weights, do not count. Terms that are reduced in different ways, over other
    examples than the layers saw, or rescaled so that they may be either, are refused by an `UnsupportedTrainingError`.

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
    terms = _data_terms(root)
    scale = LossScale(counted=[mask for term in terms if (mask := _counted(term.node)) is not None])
    for term in terms:
        _require_all_examples(term.node, batch_size)
    scale.reduction = reduction if reduction != "auto" else _common_reduction(terms, batch_size)
    return scale


def _common_reduction(terms: list[_Term], batch_size: int | None) -> str:
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
            f"The loss is a sum that was rescaled {unclear} in a batch of {batch_size} examples, so it may be a mean or a "
            "sum over them. Declare loss_reduction='mean' or 'sum', or use the loss function's reduction='mean'."
        )
    return found.pop() if found else "mean"


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
    terms = [term.node for term in _terms(loss.grad_fn)]
    nodes = [*terms, *(below for node in terms for below in _below(node, _ARITHMETIC + _REDUCING))]
    return {node.name().split("Backward")[0] for node in nodes if hasattr(node, "_saved_reduction")}


@dataclass(frozen=True)
class _Term:
    """A node that reduces examples to a scalar, and the nodes that multiply or divide its result."""

    node: Any
    factors: tuple[Any, ...]


def _data_terms(root: Any) -> list[_Term]:
    """The terms that a measured layer enters; all if none does."""
    terms = list(_terms(root))
    return [term for term in terms if enters_measured_layer(term.node)] or terms


def _terms(root: Any) -> Iterator[_Term]:
    stack: list[tuple[Any, tuple[Any, ...]]] = [(root, ())]
    seen = set()
    while stack:
        node, factors = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        parts = _stacked_scalars(node)
        if parts:  # tasks' losses put together, each reduced on its own
            stack += [(part, factors) for part in parts]
        elif hasattr(node, "_saved_reduction") or node.name().startswith(_REDUCING):
            yield _Term(node, factors)
        elif _is_scalar(node):
            factors = (*factors, node) if node.name().startswith(_SCALING) else factors
            stack += [(parent, factors) for parent, _ in node.next_functions]


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


def _reduction(term: _Term, batch_size: int | None) -> str | None:
    """``"mean"``, ``"sum"``, None if it reduces nothing, or how a sum was rescaled that may be either."""
    node = _over_examples(term.node, batch_size)
    if hasattr(node, "_saved_reduction"):
        kind = _REDUCTION_CODES.get(node._saved_reduction)
    else:
        kind = "sum" if node.name().startswith("SumBackward") else "mean"
    if kind != "sum":
        return kind
    divisors = [f._saved_other for f in term.factors if f.name().startswith("DivBackward")]
    divisor = math.prod(float(d) for d in divisors if d is not None)
    if divisors and divisor != 1:
        counted = _counted(node)
        is_count = batch_size is None or divisor % batch_size == 0 or (counted is not None and divisor == counted.sum())
        return "mean" if is_count else f"by 1/{divisor:g}"
    multipliers = [f._saved_other for f in term.factors if f.name().startswith("MulBackward")]
    multiplier = math.prod(float(m) for m in multipliers if m is not None)
    return (
        f"by {multiplier:g}" if batch_size is not None and batch_size > 2 and _is_one(multiplier * batch_size) else kind
    )


def _is_one(value: float) -> bool:
    return math.isclose(value, 1, rel_tol=1e-5)


def _over_examples(node: Any, batch_size: int | None) -> Any:
    """The node that reduces the examples: ``v.mean(0).sum()`` takes a mean over them, and sums something else."""
    if not node.name().startswith(_REDUCING):
        return node
    for found in _below(node, _ARITHMETIC):
        if found.name().startswith(_REDUCING) and _reduces_examples(found, batch_size):
            return _over_examples(found, batch_size)
    return node


def _reduces_examples(node: Any, batch_size: int | None) -> bool:
    sizes, dims = node._saved_self_sym_sizes, getattr(node, "_saved_dim", None) or ()
    reduced = {(d if d < 2**63 else d - 2**64) % len(sizes) for d in dims}  # torch shows -1 as an unsigned number
    left = [size for d, size in enumerate(sizes) if d not in reduced]
    is_batch = batch_size is None or (sizes[0] % batch_size == 0 and not any(size % batch_size == 0 for size in left))
    return 0 in reduced and is_batch


def _require_all_examples(node: Any, batch_size: int | None) -> None:
    node = _over_examples(node, batch_size)
    values = getattr(node, "_saved_self", None)
    sizes = values.shape if isinstance(values, Tensor) else getattr(node, "_saved_self_sym_sizes", ())
    if not batch_size or not sizes or sizes[0] >= batch_size or any(size % batch_size == 0 for size in sizes):
        return
    raise UnsupportedTrainingError(
        f"A term of the loss is over values of shape {list(sizes)}, but the layers saw {batch_size} examples, so it does "
        "not hold a value for each. Compute the loss of all examples in one call, and mask some by targets that are "
        "ignore_index."
    )


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
