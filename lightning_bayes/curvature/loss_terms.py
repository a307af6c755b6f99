"""What a scalar loss is made of, read from its autograd graph: terms that reduce values to a number, and their factors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_bayes.curvature.uses import enters_measured_layer

_REDUCING = ("MeanBackward", "SumBackward", "NansumBackward")
_ARITHMETIC = ("AddBackward", "SubBackward", "MulBackward", "DivBackward", "NegBackward")
_BENDING = ("SqrtBackward", "PowBackward", "LogBackward", "ExpBackward", "ReciprocalBackward", "RsqrtBackward")


@dataclass(frozen=True)
class Term:
    """A node that makes a number of values, and what is done to that number before it is added to the loss.

    Attributes:
        node: The node.
        multipliers: Numbers that it is multiplied by.
        divisors: Numbers that it is divided by.
        bent_by: Names of functions of it that are not linear.
    """

    node: Any
    multipliers: tuple[Any, ...] = ()
    divisors: tuple[Any, ...] = ()
    bent_by: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled code, which shows nothing of what it does."""
        return name_of(self.node) == "CompiledFunction"

    @property
    def is_readable(self) -> bool:
        """Whether the graph tells how it reduces."""
        return hasattr(self.node, "_saved_reduction") or reduces(self.node)

    def source(self, place: int) -> Term:
        """What the node has at `place` in a computation of numbers from numbers, with what the node does to it."""
        node, multipliers, divisors, bent_by = self.node, self.multipliers, self.divisors, self.bent_by
        if node.name().startswith("MulBackward"):
            multipliers += _saved(node, "_saved_self" if place else "_saved_other")
        elif node.name().startswith("DivBackward") and place == 0:
            divisors += _saved(node, "_saved_other")
        elif node.name().startswith(_BENDING):
            bent_by += (name_of(node),)
        return Term(node.next_functions[place][0], multipliers, divisors, bent_by)


def _saved(node: Any, name: str) -> tuple[Any, ...]:
    value = getattr(node, name, None)
    return () if value is None else (value,)


def data_terms(root: Any) -> list[Term]:
    """The terms that a measured layer enters; all if none does.

    Args:
        root: Node of the loss.

    Returns:
        Them, without the leaves among the scalars that are added.
    """
    terms = list(terms_of(root))
    return [term for term in terms if enters_measured_layer(term.node)] or terms


def terms_of(root: Any) -> Iterator[Term]:
    """Yield every term of a loss.

    Args:
        root: Node of the loss.

    Yields:
        Terms, those whose reduction cannot be read too.
    """
    stack = [Term(root)]
    seen = {None}
    while stack:
        term = stack.pop()
        if term.node in seen:
            continue
        seen.add(term.node)
        if hasattr(term.node, "_saved_reduction") or term.is_compiled:
            yield term
        elif _is_of_numbers(term.node) or name_of(term.node) == "_DDPSink":  # the identity on all outputs
            places = enumerate(term.node.next_functions)
            stack += [term.source(i) for i, edge in places if edge[0] is not None and _is_number(*edge)]
        elif parts := _stacked_numbers(term.node):  # tasks' losses put together, each reduced on its own
            stack += [replace(term, node=part) for part in parts]
        else:
            yield term


def _stacked_numbers(node: Any) -> list[Any]:
    """The numbers that ``torch.stack([a, b]).sum()`` adds, with any weights in between; empty for other nodes."""
    for found in below(node):
        if found.name().startswith(("StackBackward", "CatBackward")):
            return parents(found) if _is_of_numbers(found) else []
    return []


def _is_of_numbers(node: Any) -> bool:
    """Whether all that `node` was computed from are numbers."""
    return all(_is_number(*edge) for edge in node.next_functions if edge[0] is not None)


def _is_number(node: Any, output: int) -> bool:
    return bool(math.prod(node._input_metadata[output].shape) == 1)


def name_of(node: Any) -> str:
    """The operation as torch calls it: ``"MseLoss"``."""
    return str(node.name().split("Backward")[0])


def below(node: Any, through: tuple[str, ...] = _ARITHMETIC) -> Iterator[Any]:
    """Yield what `node` was computed from, and what that was computed from if its name begins as one of `through`."""
    stack, seen = parents(node), {node}
    while stack:
        found = stack.pop()
        if found in seen:
            continue
        seen.add(found)
        yield found
        if found.name().startswith(through):
            stack += parents(found)


def below_reductions(node: Any) -> Iterator[Any]:
    """As `below`, through arithmetic and reductions."""
    return below(node, _ARITHMETIC + _REDUCING)


def parents(node: Any) -> list[Any]:
    """The nodes that `node` was computed from."""
    return [parent for parent, _ in node.next_functions if parent is not None]


def reduces(node: Any) -> bool:
    """Whether `node` is a mean or a sum."""
    return bool(node.name().startswith(_REDUCING))


def sizes_of(node: Any) -> tuple[int, ...]:
    """Shape of the targets of a loss function, or else of what `node` was computed from; empty if it does not tell."""
    for name in ("_saved_target", "_saved_self"):
        if isinstance(value := getattr(node, name, None), Tensor):
            return tuple(value.shape)
    return tuple(getattr(node, "_saved_self_sym_sizes", ()))


def over_examples(node: Any, batch_size: int | None) -> Any:
    """The node that reduces the examples: ``v.mean(0).sum()`` takes a mean over them, and sums something else.

    Args:
        node: Of a term.
        batch_size: Number of examples; None if it is not known.

    Returns:
        A node below `node`, or itself.
    """
    if not reduces(node):
        return node
    for found in below(node):
        if reduces(found) and _reduces_examples(found, batch_size):
            return over_examples(found, batch_size)
    return node


def _reduces_examples(node: Any, batch_size: int | None) -> bool:
    sizes, dims = sizes_of(node), getattr(node, "_saved_dim", None) or ()
    reduced = {signed(d) % len(sizes) for d in dims}
    if 0 not in reduced:
        return False
    left = [size for d, size in enumerate(sizes) if d not in reduced]
    return (
        batch_size is None
        or sizes[0] == batch_size
        or (sizes[0] % batch_size == 0 and not any(size % batch_size == 0 for size in left))
    )


def signed(dim: int) -> int:
    """A dimension as it was given; torch shows -1 as an unsigned number."""
    return dim if dim < 2**63 else dim - 2**64
