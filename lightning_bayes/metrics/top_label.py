"""The most probable class: its confidence, and whether it is correct.

Calibration and selective prediction need no other inputs. This module also checks the probabilities for all metrics of the
package, and defines the base class of metrics that need all examples at the end because they sort by confidence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import NonFiniteError, ShapeError
from lightning_bayes.metrics.states import StoredMetric


class TopLabel(NamedTuple):
    """The most probable class of each example; both fields are ``[batch]`` and floating point."""

    confidence: Tensor  # max_c p_c, between 1/classes and 1
    correct: Tensor  # 1 where the most probable class is the target, else 0


def checked_probs(probs: Tensor, targets: Tensor) -> Tensor:
    """Check that ``probs`` are probabilities for these targets, and return them in at least single precision."""
    # Libraries that guess whether inputs are logits apply a softmax to the whole batch if rounding leaves 1 + 1e-7.
    if probs.ndim != 2 or targets.shape != probs.shape[:1] or not probs.is_floating_point():
        raise ShapeError(
            f"Expected floating-point probs [batch, classes] and targets [batch], got {probs.dtype} "
            f"{list(probs.shape)} and {list(targets.shape)}. Flatten further dimensions into the batch first."
        )
    if targets.is_floating_point() or targets.is_complex():
        raise ShapeError(f"Targets must be class indices, got {targets.dtype}. Use targets.argmax(-1) for soft labels.")
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps ** 0.5)
    wide = probs.detach().to(torch.promote_types(probs.dtype, torch.float32))
    proper = (wide >= 0).all(-1) & ((wide.sum(-1) - 1).abs() <= tolerance)
    in_range = (targets >= 0) & (targets < probs.shape[1])
    if not bool((proper & in_range).all()):  # one device synchronization for both checks
        has_nan = wide.isnan().any(-1)
        if bool(has_nan.any()):
            raise NonFiniteError(
                f"{int(has_nan.sum())} of {len(wide)} examples have probabilities that are nan, the first one in row "
                f"{int(has_nan.nonzero()[0])}. Look for nan or infinity in the inputs and weights of the model."
            )
        raise ShapeError(_shape_message(wide, targets, proper))
    return wide


def _shape_message(probs: Tensor, targets: Tensor, proper: Tensor) -> str:
    if proper.all():
        return (
            f"Targets must be class indices from 0 to {probs.shape[1] - 1}, "
            f"but lie between {targets.min()} and {targets.max()}."
        )
    row = int((~proper).nonzero()[0])
    values = ", ".join(f"{p:.4g}" for p in probs[row, :4].tolist())
    return (
        f"Row {row} of probs is not a probability vector: it starts with [{values}] and sums to {probs[row].sum():.4g}. "
        "These metrics need probabilities, not logits: pass logits.softmax(-1)."
    )


def top_label(probs: Tensor, targets: Tensor) -> TopLabel:
    """Confidence and correctness of the most probable class; the first class wins ties."""
    confidence, label = checked_probs(probs, targets).max(-1)
    return TopLabel(confidence, (label == targets).to(confidence.dtype))


def mean_over_ties(keys: Tensor, values: Tensor) -> Tensor:
    """Replace each value by the mean over the examples with the same key; all are ``[batch]``."""
    # Saturated softmaxes produce many ties. After this replacement, a sum over a prefix of the sorted examples is its
    # expectation over all orders of the ties, and depends neither on the order of the data nor on the processes.
    distinct, group, count = torch.unique(keys, return_inverse=True, return_counts=True)
    total = torch.zeros_like(distinct, dtype=values.dtype).index_add_(0, group, values)
    means: Tensor = total / count
    return means[group]


class TopLabelMetric(StoredMetric):
    """Base class of metrics that need the confidence and correctness of all examples. Subclasses define ``measure``."""

    columns = ("confidence", "correct")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        self.store(*top_label(preds, target))
