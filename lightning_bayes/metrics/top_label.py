"""The most probable class: its confidence, and whether it is right.

Calibration and selective prediction look at nothing else. This file checks probabilities once for all metrics of this
room, and keeps the two numbers per example for those metrics that need them all at the end (they sort by confidence).
"""

from __future__ import annotations

from abc import ABC
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bayes.errors import NonFiniteError, ShapeError
from lightning_bayes.metrics.states import concatenated


class TopLabel(NamedTuple):
    """The most probable class of each example; both fields are ``[batch]`` and floating point."""

    confidence: Tensor  # max_c p_c, between 1/classes and 1
    correct: Tensor  # 1 where the most probable class is the target, else 0


def checked_probs(probs: Tensor, targets: Tensor) -> Tensor:
    """Return ``probs`` in at least single precision, after checking that they are probabilities of these targets.

    Metrics that guess whether they were given logits or probabilities turn a probability of 1 + 1e-7, as rounding
    leaves behind, into a softmax of the whole batch. Here nothing is guessed.

    Args:
        probs: Class probabilities, ``[batch, classes]``; rows sum to one up to rounding.
        targets: Class indices, integers in ``[batch]``.

    Returns:
        The probabilities, ``[batch, classes]``, in float32 or float64.

    Raises:
        ShapeError: If the shapes do not fit, or the values are not probabilities or class indices.
        NonFiniteError: If a probability is nan.

    Example:
        >>> checked_probs(torch.tensor([[0.5, 0.5]], dtype=torch.bfloat16), torch.tensor([1])).dtype
        torch.float32
    """
    if probs.ndim != 2 or targets.shape != probs.shape[:1] or not probs.is_floating_point():
        raise ShapeError(
            f"Expected floating-point probs [batch, classes] and targets [batch], got {probs.dtype} "
            f"{list(probs.shape)} and {list(targets.shape)}. Flatten further dimensions into the batch first."
        )
    if targets.is_floating_point() or targets.is_complex():
        raise ShapeError(f"Targets are class indices, but got {targets.dtype}. Use probs.argmax(-1) for soft labels.")
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps ** 0.5)
    wide = probs.detach().to(torch.promote_types(probs.dtype, torch.float32))
    proper = (wide >= 0).all(-1) & ((wide.sum(-1) - 1).abs() <= tolerance)
    in_range = (targets >= 0) & (targets < probs.shape[1])
    if not bool((proper & in_range).all()):  # one synchronization with the device for both checks
        undefined = wide.isnan().any(-1)
        if bool(undefined.any()):
            raise NonFiniteError(
                f"{int(undefined.sum())} of {len(wide)} examples have probabilities that are nan, the first one in row "
                f"{int(undefined.nonzero()[0])}. Look for nan or infinity in the inputs and weights of the model."
            )
        raise ShapeError(_complaint(wide, targets, proper))
    return wide


def _complaint(probs: Tensor, targets: Tensor, proper: Tensor) -> str:
    if proper.all():
        return (
            f"Targets must be class indices from 0 to {probs.shape[1] - 1}, "
            f"but lie between {targets.min()} and {targets.max()}."
        )
    row = int((~proper).nonzero()[0])
    values = ", ".join(f"{p:.4g}" for p in probs[row, :4].tolist())
    return (
        f"Row {row} of probs is not a probability vector: it starts with [{values}] and sums to {probs[row].sum():.4g}. "
        "These metrics take probabilities, not logits: pass logits.softmax(-1)."
    )


def top_label(probs: Tensor, targets: Tensor) -> TopLabel:
    """Confidence and correctness of the most probable class (the first one among equals).

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        Two tensors ``[batch]``: ``confidence = max_c p_c`` and ``correct`` in {0, 1}.

    Example:
        >>> top_label(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
        TopLabel(confidence=tensor([0.7500, 0.5000]), correct=tensor([1., 0.]))
    """
    confidence, label = checked_probs(probs, targets).max(-1)
    return TopLabel(confidence, (label == targets).to(confidence.dtype))


def mean_over_ties(keys: Tensor, values: Tensor) -> Tensor:
    """Replace each value by the mean over the examples with the same key.

    What sorts by confidence depends on the accidental order of equal confidences, and saturated softmaxes have many of
    them. With tied values replaced by their mean, a sum over a prefix of the sorted examples is its expectation over
    all orders of the ties, so neither the order of the data nor its distribution over processes matters.

    Args:
        keys: The sort keys, ``[batch]``.
        values: The terms of the sums, floating point ``[batch]``.

    Returns:
        The values, averaged within ties, ``[batch]``.

    Example:
        >>> mean_over_ties(torch.tensor([0.9, 0.5, 0.9]), torch.tensor([1.0, 1.0, 0.0]))
        tensor([0.5000, 1.0000, 0.5000])
    """
    distinct, group, count = torch.unique(keys, return_inverse=True, return_counts=True)
    total = torch.zeros_like(distinct, dtype=values.dtype).index_add_(0, group, values)
    means: Tensor = total / count
    return means[group]


class TopLabelMetric(Metric, ABC):
    """Base of metrics that need the confidence and correctness of all examples at once; subclasses define ``compute``.

    The two states are concatenated over processes, and kept in the metric's own dtype (``set_dtype`` changes it).
    """

    is_differentiable = False
    full_state_update = False

    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        seen = top_label(preds, target)
        self.confidence.append(seen.confidence.to(self.dtype))
        self.correct.append(seen.correct.to(self.dtype))

    def top_labels(self) -> TopLabel:
        """Return all examples seen since the last reset, of all processes once synchronized."""
        return TopLabel(concatenated(self, "confidence"), concatenated(self, "correct"))
