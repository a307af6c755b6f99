"""Detection of out-of-distribution (OOD) inputs by a score such as the predictive entropy, and of misclassified inputs.

OOD is the positive class, and a higher score means more OOD (Hendrycks & Gimpel 2017, https://arxiv.org/abs/1610.02136).
For misclassified inputs, errors are the positive class, with score ``1 - max_c p_c``; that AUROC is most likely the one in
the tables of Osawa et al. 2019 (https://arxiv.org/abs/1906.02506), who do not define it.

Only the order of the scores matters. They are replaced by ranks, because torchmetrics applies a sigmoid to scores outside
[0, 1], which makes all scores above about 17 equal in float32.

Every value is undefined and ``nan`` if either kind of input is missing, such as errors or correct predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision, binary_roc
from typing_extensions import override

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics.states import StoredMetric
from lightning_bayes.metrics.top_label import TopLabelMetric

TRUE_POSITIVE_RATE = 0.95  # the 95 in FPR95


def ood_auroc(scores: Tensor, is_ood: Tensor) -> Tensor:
    """Area under the ROC curve: the probability that an OOD input scores higher than an ID input; ties count half.

    Args:
        scores: Any real or infinite values, ``[batch]``; higher means more OOD.
        is_ood: Booleans or 0/1, ``[batch]``.

    Returns:
        A scalar between 0 and 1; 0.5 for uninformative scores.

    Example:
        >>> ood_auroc(torch.tensor([-3.0, 20.0, 30.0, 40.0]), torch.tensor([0, 1, 0, 1]))
        tensor(0.7500)
    """
    return _of_ranks(binary_auroc, scores, is_ood).clamp(max=1)  # rounding errors can exceed 1


def ood_aupr(scores: Tensor, is_ood: Tensor) -> Tensor:
    """Average precision, the step-wise area under the precision-recall curve; see `ood_auroc` for the arguments."""
    return _of_ranks(binary_average_precision, scores, is_ood)


def ood_fpr95(scores: Tensor, is_ood: Tensor) -> Tensor:
    """False-positive rate at 95 % true-positive rate: the fraction of ID inputs flagged if 95 % of OOD inputs are."""
    # The smallest rate among the thresholds that detect at least 95 %, without interpolation between thresholds.
    return _of_ranks(_fpr95, scores, is_ood)


def _fpr95(ranks: Tensor, labels: Tensor, *, validate_args: bool) -> Tensor:
    false_positive_rate, true_positive_rate, _ = binary_roc(ranks, labels, validate_args=validate_args)
    return false_positive_rate[true_positive_rate >= TRUE_POSITIVE_RATE].min()


def _of_ranks(measure: Callable[..., Tensor], scores: Tensor, is_ood: Tensor) -> Tensor:
    """Apply a measure to the ranks of the scores; ``nan`` if either kind of input is missing."""
    _check(scores, is_ood)
    distinct, rank = torch.unique(scores, return_inverse=True)
    ranks: Tensor = rank / max(len(distinct) - 1, 1)  # float32: exact up to 16 million distinct scores
    labels = is_ood.long()
    if not 0 < int(labels.sum()) < len(labels):
        return ranks.new_full((), torch.nan)
    return measure(ranks, labels, validate_args=False)


def _check(scores: Tensor, is_ood: Tensor) -> None:
    if scores.ndim != 1 or scores.shape != is_ood.shape:
        raise ShapeError(
            f"Expected scores [batch] and is_ood [batch], got {list(scores.shape)} and {list(is_ood.shape)}. "
            "Give one score per input, for instance its predictive entropy."
        )
    if bool(scores.isnan().any()):
        raise NonFiniteError(f"{int(scores.isnan().sum())} of {len(scores)} OOD scores are nan and cannot be ranked.")
    if not bool(((is_ood == 0) | (is_ood == 1)).all()):
        raise ShapeError(
            f"is_ood must be 1 for OOD inputs and 0 for others, but has values from {is_ood.min()} to {is_ood.max()}. "
            "Do not pass class labels."
        )


# The score of an error is not 1 - confidence, which would round small differences away.
@final
class MisclassificationAUROC(TopLabelMetric):
    """Probability that an error is less confident than a correct prediction; a tie counts half."""

    higher_is_better = True

    @override
    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return ood_auroc(-confidence, 1 - correct)


@final
class MisclassificationAUPR(TopLabelMetric):
    """Average precision with errors as the positive class."""

    higher_is_better = True

    @override
    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return ood_aupr(-confidence, 1 - correct)


@final
class MisclassificationFPR95(TopLabelMetric):
    """False-positive rate at 95 % true-positive rate: correct predictions lost if 95 % of the errors are rejected."""

    higher_is_better = False

    @override
    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return ood_fpr95(-confidence, 1 - correct)


_MEASURES = {"AUROC": ood_auroc, "AUPR": ood_aupr, "FPR95": ood_fpr95}


@final
class OODDetection(StoredMetric):
    """AUROC, AUPR and FPR95 of every score on every set; OOD is the positive class (see `ood_auroc`).

    ``compute`` returns ``{set}/{score}/{measure}`` for each score and each set against the test set. For the first score it
    also returns ``{measure}`` for all sets together and, if there are several sets, ``{set}/{measure}`` for each set.

    Args:
        sets: Names of the OOD sets, at least one.
        scores: Names of the scores, at least one.
        prefix: Prefix of every key, including the slash.
        **kwargs: Passed to `torchmetrics.Metric`.

    Raises:
        HyperparameterError: If there are no sets or no scores, or a name occurs twice.
    """

    # Scores are [batch, scores], flattened because the state of a process without data has one dimension. The set index is
    # 0 for the test set.
    columns = ("scores", "set_index")

    def __init__(self, sets: Sequence[str], scores: Sequence[str], prefix: str = "ood/", **kwargs: Any) -> None:
        for argument, names in (("sets", sets), ("scores", scores)):
            if not names or len(set(names)) < len(names):
                raise HyperparameterError(f"{argument}={list(names)} must contain at least one name, each once.")
        super().__init__(**kwargs)
        self.sets, self.score_names, self.prefix = tuple(sets), tuple(scores), prefix

    def update(self, scores: Mapping[str, Tensor], set_index: int) -> None:
        """Add a batch: every score by name, ``[batch]`` each, of set 0 (the test set), 1 (the first OOD set) and so on."""
        sizes = {len(value) if value.ndim == 1 else None for value in scores.values()}
        if set(scores) != set(self.score_names) or len(sizes) > 1 or None in sizes:
            shapes = {name: list(value.shape) for name, value in scores.items()}
            raise ShapeError(f"Expected the scores {list(self.score_names)}, [batch] each, got {shapes}.")
        columns = torch.stack([scores[name].detach() for name in self.score_names], -1)
        if bool(columns.isnan().any()):
            raise NonFiniteError(f"{int(columns.isnan().any(-1).sum())} of {len(columns)} inputs have a score of nan.")
        self.store(columns.flatten(), torch.full((len(columns),), set_index, device=columns.device))

    def measure(self, scores: Tensor, set_index: Tensor) -> dict[str, Tensor]:
        """Return all values by key; ``nan`` if either kind of input is missing."""
        values = self._values(scores.view(-1, len(self.score_names)), set_index)
        return {self.prefix + key: value for key, value in values}

    def _values(self, columns: Tensor, index: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from _measured("", columns[:, 0], index > 0)
        for position, name in enumerate(self.sets, start=1):
            either = (index == 0) | (index == position)
            if len(self.sets) > 1:
                yield from _measured(f"{name}/", columns[either, 0], index[either] > 0)
            for column, score in enumerate(self.score_names):
                yield from _measured(f"{name}/{score}/", columns[either, column], index[either] > 0)


def _measured(prefix: str, scores: Tensor, is_ood: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, measure in _MEASURES.items():
        yield prefix + name, measure(scores, is_ood)
