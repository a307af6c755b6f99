"""Where the targets of a loss come from in a batch, by their values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_bayes.likelihood.module_outputs import Leaf
from lightning_bayes.likelihood.terms import Term
from lightning_bayes.likelihood.value import Targets


def targets_of(term: Term, batch: Iterable[Leaf]) -> Targets:
    """The entry of a batch that holds the targets of a term, and which of them the term ignores."""
    if term.targets is None or term.weights is not None:
        return Targets()
    mask = torch.ones_like(term.targets, dtype=torch.bool) if term.mask is None else term.mask
    mask = mask if mask.shape == term.targets.shape else _with_classes(mask, term)
    if not bool(mask.any()):
        return Targets()
    for path, value in batch:
        if value.numel() == term.targets.numel() and not value.is_complex():
            given = value.detach().to(term.targets.device).reshape(term.targets.shape)
            if _are_equal(given[mask], term.targets[mask]):
                return _with_ignored(Targets(path), given, mask, term)
    return Targets()


def _with_classes(mask: Tensor, term: Term) -> Tensor:
    """A mask of targets beside probabilities of classes."""
    assert term.targets is not None
    dim = next(
        d for d in range(term.targets.dim()) if term.targets.shape[:d] + term.targets.shape[d + 1 :] == mask.shape
    )
    return mask.unsqueeze(dim).expand_as(term.targets)


def _with_ignored(found: Targets, given: Tensor, mask: Tensor, term: Term) -> Targets:
    """Which value the targets that do not count have, if it is theirs alone."""
    left, kept = given[~mask], given[mask]
    if not left.numel():
        return Targets(found.path, term.ignored)
    value = left[0]
    is_one = bool(left.isnan().all()) if bool(value != value) else bool((left == value).all())
    if is_one and not bool((kept == value).any()):
        return Targets(found.path, float(value))
    return Targets(found.path, term.ignored, is_selected=True)


def _are_equal(given: Tensor, used: Tensor) -> bool:
    return torch.allclose(given.double(), used.double(), rtol=1e-6, atol=0, equal_nan=True)
