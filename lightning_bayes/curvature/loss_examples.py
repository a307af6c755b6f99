"""Which examples of the batch count in a loss: those whose targets are not all to be ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.loss_terms import Term, below, name_of, over_examples, parents, signed, sizes_of
from lightning_bayes.curvature.uses import enters_measured_layer, until_layers
from lightning_bayes.errors import UnsupportedTrainingError

_KEEPING_ORDER = ("LogSoftmax", "View", "UnsafeView", "ReshapeAlias", "Clone", "ToCopy", "Slice", "Mul", "Div", "Add")
_MOVING = ("Transpose", "Permute", "T")


def counted_targets(node: Any) -> Tensor | None:
    """Which targets of a loss function count.

    Args:
        node: Of a term.

    Returns:
        Booleans in the targets' shape; None if it knows no targets to ignore.
    """
    if not hasattr(node, "_saved_ignore_index"):
        return None
    counted: Tensor = node._saved_target != node._saved_ignore_index
    return counted


def counted_examples(terms: list[Term], batch_size: int | None) -> list[Tensor]:
    """What `LossScale.counted` holds.

    Args:
        terms: Of the loss.
        batch_size: Number of examples that the layers saw; None if it is not known.

    Returns:
        Booleans by target, examples first, for each term that ignores targets; none if another term has all examples.
    """
    targets = {term.node: mask for term in terms if (mask := counted_targets(term.node)) is not None}
    others = [term.node for term in terms if term.node not in targets and enters_measured_layer(term.node)]
    if not all(_ignores_as(node, list(targets.values())) for node in others):
        return []
    return [_examples_first(node, mask, batch_size) for node, mask in targets.items()]


def _ignores_as(node: Any, targets: list[Tensor]) -> bool:
    """Whether `node` leaves out the same, as the second half of a cross-entropy with label smoothing does."""
    filled = [found._saved_mask for found in below(node) if name_of(found) == "MaskedFill"]
    return any(mask.shape == counted.shape and bool((mask != counted).all()) for mask in filled for counted in targets)


def _examples_first(node: Any, mask: Tensor, batch_size: int | None) -> Tensor:
    if batch_size and mask.dim() == 1 and not mask.numel() % batch_size and _leading_dim(node) != 0:
        return mask.reshape(-1, batch_size).T
    return mask


def _leading_dim(node: Any) -> int:
    """The dimension of the layers' output that comes first in the values of a loss function; examples have 0."""
    dim = 0
    for found in _reshapes(node):
        rank = len(found._input_metadata[0].shape)
        if name_of(found) == "Transpose":
            swapped = [signed(d) % rank for d in (found._saved_dim0, found._saved_dim1)]
            dim = sum(swapped) - dim if dim in swapped else dim
        elif name_of(found) == "Permute":
            dim = signed(found._saved_dims[dim]) % rank
        elif name_of(found) == "T":
            dim = 1 - dim
    return dim


def _reshapes(node: Any) -> Iterator[Any]:
    """Yield what was done to the layers' output last, as long as it kept the order of dimensions or changed it."""
    while sources := parents(node):
        node = sources[0]
        if name_of(node) not in _KEEPING_ORDER + _MOVING:
            return
        yield node


def require_all_examples(term: Term, batch_size: int | None) -> None:
    """Require a term to hold values of each example.

    Args:
        term: Of the loss; one whose reduction cannot be read passes.
        batch_size: Number of examples that the layers saw; None if it is not known.

    Raises:
        UnsupportedTrainingError: If it holds fewer.
    """
    node = over_examples(term.node, batch_size)
    if not batch_size or not term.is_readable:
        return
    sizes = sizes_of(node) or (1,)
    in_another_dim = any(size % batch_size == 0 for size in sizes) and not _takes_some(node, batch_size)
    if sizes[0] >= batch_size or in_another_dim:
        return
    raise UnsupportedTrainingError(
        f"A term of the loss is over values of shape {list(sizes)}, but the layers saw {batch_size} examples, so it does "
        "not hold a value for each. Compute the loss of all examples in one call, and mask some by targets that are "
        "ignore_index."
    )


def _takes_some(node: Any, batch_size: int) -> bool:
    """Whether rows of the layers' output are left out on its way to `node`, as by ``output[:4]``."""
    for found in until_layers(node):
        before = tuple(getattr(found, "_saved_self_sym_sizes", ()))
        for meta in found._input_metadata:
            if before[:1] == (batch_size,) and len(meta.shape) == len(before) and meta.shape[0] < batch_size:
                return True
    return False


def num_counted(masks: list[Tensor], batch_size: int) -> int:
    """Number of examples that count in any term.

    Args:
        masks: Of `counted_examples`.
        batch_size: Number of examples that the layers saw.

    Returns:
        n, at least 1.
    """
    if not masks:
        return batch_size
    rows = [_by_example(mask, batch_size) for mask in masks]
    return max(1, int(torch.stack(rows).any(0).sum()))


def _by_example(mask: Tensor, batch_size: int) -> Tensor:
    if mask.numel() % batch_size:  # targets that do not divide into examples cannot ignore one
        return torch.ones(batch_size, dtype=torch.bool, device=mask.device)
    return mask.reshape(batch_size, -1).any(1)  # [B·T] or [B, T]: an example counts if one of its targets does
