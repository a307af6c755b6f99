"""Proper scores of class probabilities, negative log-likelihood and Brier score, and the accuracy.

    NLL = - mean_i log p_i[y_i]  (nats)        Brier = mean_i Σ_c (p_i[c] - 1{y_i = c})²

The Brier score is the sum over classes, from 0 to 2, as defined by Brier 1950
(https://doi.org/10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2). Some libraries divide it by 2 or by the number of classes.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_bayes.metrics.states import MeanOverExamples
from lightning_bayes.metrics.top_label import checked_probs


def nll_per_example(probs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probability of the target class, in nats; its mean over examples is the NLL."""
    # A target with probability zero would make the mean infinite. With the clamp at the smallest normal number, one example
    # costs at most 87.3 nats in float32, which half-precision inputs are converted to, and 708.4 nats in float64.
    probs = checked_probs(probs, targets)
    target_prob = probs.gather(1, targets.long().unsqueeze(1)).squeeze(1)
    return -target_prob.clamp(torch.finfo(probs.dtype).tiny, 1.0).log()


def brier_per_example(probs: Tensor, targets: Tensor) -> Tensor:
    """Squared distance between the probabilities and the one-hot target, summed over classes, from 0 to 2; ``[batch]``."""
    probs = checked_probs(probs, targets)
    one_hot = torch.nn.functional.one_hot(targets.long(), probs.shape[1])
    return (probs - one_hot).square().sum(-1)


@final
class NegativeLogLikelihood(MeanOverExamples):
    """Mean negative log-likelihood of class probabilities, in nats."""

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        self.add(nll_per_example(preds, target))


@final
class BrierScore(MeanOverExamples):
    """Mean over examples of the Brier score summed over classes, from 0 to 2."""

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        self.add(brier_per_example(preds, target))


@final
class Accuracy(MulticlassAccuracy):
    """Fraction of examples whose most probable class is the target.

    This is torchmetrics' accuracy averaged over examples. Its default averages over classes, which differs on unbalanced
    data.
    """

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(num_classes, average="micro", validate_args=False, **kwargs)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        super().update(checked_probs(preds, target), target)
