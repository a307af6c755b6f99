"""Selective prediction: how wrong is the model on the share of inputs that it is surest of?

    AURC = 1/N Σ_k risk(k),        risk(k) = share of errors among the k examples of highest confidence max_c p_c

the area under the risk-coverage curve (Geifman et al. 2019, https://arxiv.org/abs/1805.08206), as a mean over the N
coverages 1/N … 1. Some libraries integrate the same curve by the trapezoid rule, which differs by O(1/N).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_bayes.metrics.top_label import TopLabel, TopLabelMetric, mean_over_ties, top_label


def aurc(probs: Tensor, targets: Tensor) -> Tensor:
    """Area under the risk-coverage curve, with the largest probability as confidence and 0/1 errors as risk.

    Where several examples are equally confident, the value is the mean over all orders in which they can be taken.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        A scalar between 0 (no error) and 1 (no correct prediction). At equal accuracy, lower means that errors are
        less confident.

    Example:
        >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))  # risks 0 and 1/2
        tensor(0.2500)
    """
    return _aurc(top_label(probs, targets))


def _aurc(seen: TopLabel) -> Tensor:
    error = 1 - mean_over_ties(seen.confidence, seen.correct)
    errors_so_far = error[seen.confidence.argsort(descending=True)].cumsum(0)
    examples_so_far = torch.arange(1, len(error) + 1, device=error.device)
    return (errors_so_far / examples_so_far).mean()


@final
class AURC(TopLabelMetric):
    """Area under the risk-coverage curve (see `aurc`).

    Example:
        >>> metric = AURC()
        >>> metric(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.2500)
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the area over all examples since the last reset."""
        return _aurc(self.top_labels())
