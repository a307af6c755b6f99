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
from lightning_bayes.metrics.top_label import TopLabel, TopLabelMetric, top_label


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
    return ood_auroc(*_scored(top_label(probs, targets)))


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
    return ood_aupr(*_scored(top_label(probs, targets)))


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
    return ood_fpr95(*_scored(top_label(probs, targets)))


def _scored(top: TopLabel) -> tuple[Tensor, Tensor]:
    """Scores and labels of errors; the score is not 1 - confidence, which would round small differences away."""
    return -top.confidence, 1 - top.correct


@final
class MisclassificationAUROC(TopLabelMetric):
    """Area under the ROC curve with errors as the positive class (see `misclassification_auroc`).

    Example:
        >>> import torch
        >>> metric = MisclassificationAUROC()
        >>> metric(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(1.)
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the area over all examples since the last reset; ``nan`` if there were none."""
        return ood_auroc(*_scored(self.top_labels()))


@final
class MisclassificationAUPR(TopLabelMetric):
    """Average precision with errors as the positive class (see `misclassification_aupr`).

    Example:
        >>> import torch
        >>> metric = MisclassificationAUPR()
        >>> metric(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(1.)
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the average precision over all examples since the last reset; ``nan`` if there were none."""
        return ood_aupr(*_scored(self.top_labels()))


@final
class MisclassificationFPR95(TopLabelMetric):
    """False-positive rate at 95 % true-positive rate, errors positive (see `misclassification_fpr95`).

    Example:
        >>> import torch
        >>> metric = MisclassificationFPR95()
        >>> metric(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.)
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the rate over all examples since the last reset; ``nan`` if there were none."""
        return ood_fpr95(*_scored(self.top_labels()))
