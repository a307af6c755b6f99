"""Detection of misclassified inputs: is the model less confident when it is wrong?

Errors are the positive class, with score ``1 - max_c p_c`` (Hendrycks & Gimpel 2017, https://arxiv.org/abs/1610.02136). The
AUROC uses in-distribution examples only. It is most likely the AUROC in the tables of Osawa et al. 2019
(https://arxiv.org/abs/1906.02506), who do not define it.

Every value is undefined and ``nan`` if all predictions are correct, or all are wrong.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from lightning_bayes.metrics.ood import ood_aupr, ood_auroc, ood_fpr95
from lightning_bayes.metrics.states import StoredMetric
from lightning_bayes.metrics.top_label import top_label


def misclassification_auroc(probs: Tensor, targets: Tensor) -> Tensor:
    """Probability that an error is less confident than a correct prediction; a tie counts half.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        A scalar between 0 and 1; 0.5 for uninformative confidences.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> misclassification_auroc(probs, torch.tensor([0, 1, 0, 1]))
        tensor(0.7500)
    """
    return ood_auroc(*_scored(probs, targets))


def misclassification_aupr(probs: Tensor, targets: Tensor) -> Tensor:
    """Average precision with errors as the positive class; the error rate for uninformative confidences.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        A scalar between 0 and 1.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> misclassification_aupr(probs, torch.tensor([0, 1, 0, 1]))
        tensor(0.8333)
    """
    return ood_aupr(*_scored(probs, targets))


def misclassification_fpr95(probs: Tensor, targets: Tensor) -> Tensor:
    """False-positive rate at 95 % true-positive rate: correct predictions lost if 95 % of the errors are rejected.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        A scalar between 0 and 1; lower is better.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> misclassification_fpr95(probs, torch.tensor([0, 1, 0, 1]))
        tensor(0.5000)
    """
    return ood_fpr95(*_scored(probs, targets))


def _scored(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and labels of errors; the score is not 1 - confidence, which would round small differences away."""
    confidence, correct = top_label(probs, targets)
    return -confidence, 1 - correct


class ErrorMetric(StoredMetric):
    """Base class of metrics of the detection of errors. Subclasses define ``measure``."""

    columns = ("scores", "is_error")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        self.store(*_scored(preds, target))


@final
class MisclassificationAUROC(ErrorMetric):
    """Area under the ROC curve with errors as the positive class (see `misclassification_auroc`)."""

    higher_is_better = True
    measure = staticmethod(ood_auroc)


@final
class MisclassificationAUPR(ErrorMetric):
    """Average precision with errors as the positive class (see `misclassification_aupr`)."""

    higher_is_better = True
    measure = staticmethod(ood_aupr)


@final
class MisclassificationFPR95(ErrorMetric):
    """False-positive rate at 95 % true-positive rate, errors positive (see `misclassification_fpr95`)."""

    higher_is_better = False
    measure = staticmethod(ood_fpr95)
