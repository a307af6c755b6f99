"""The metrics of each task as a `torchmetrics.MetricCollection`, under the keys that the field's dashboards use.

Update a collection in ``test_step``, then log it with ``self.log_dict(collection)``.

Compute groups, in which metrics share states, are disabled. torchmetrics detects groups by comparing the states after the
first batch. On a batch of perfect predictions, NLL and Brier score are both zero, and torchmetrics would permanently treat
them as one metric. With explicit groups, ``forward`` of the collection loses earlier batches if the first member of a group
is not the first in alphabetical order.
"""

from __future__ import annotations

from torchmetrics import Metric, MetricCollection

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.calibration import (
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
)
from lightning_bayes.metrics.detection import (
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
)
from lightning_bayes.metrics.regression import (
    IntervalCoverage,
    IntervalWidth,
    MixtureNLL,
    RootMeanSquaredError,
)
from lightning_bayes.metrics.scoring import Accuracy, BrierScore, NegativeLogLikelihood
from lightning_bayes.metrics.selective import AURC, CoverageAtRisk, RiskAtCoverage


def classification_metrics(num_classes: int, prefix: str) -> MetricCollection:
    """Accuracy, proper scores, calibration errors (15 bins), selective prediction and detection of misclassifications.

    Update with ``(probs [batch, classes], targets [batch])``: probabilities, not logits.

    Args:
        num_classes: Number of classes, at least two.
        prefix: Prefix of every key, including the slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under these keys after the prefix: ``cls/Acc``, ``cls/NLL`` (nats), ``cls/Brier`` (sum over classes);
        ``cal/ECE``, ``cal/MCE``, ``cal/aECE`` (adaptive), ``cal/cECE`` (class-wise); ``sc/AURC``, ``sc/Cov_5Risk``
        (coverage at a risk of 5 %), ``sc/Risk_80Cov`` (risk at a coverage of 80 %); and ``mis/AUROC``, ``mis/AUPR``,
        ``mis/FPR95``, which are ``nan`` if no prediction is wrong.

    Raises:
        HyperparameterError: If there are fewer than two classes.
    """
    if num_classes < 2:
        raise HyperparameterError(
            f"Classification metrics need at least two classes, got num_classes={num_classes}. "
            "Give a binary classifier two outputs."
        )
    metrics: dict[str, Metric | MetricCollection] = {
        "cls/Acc": Accuracy(num_classes),
        "cls/NLL": NegativeLogLikelihood(),
        "cls/Brier": BrierScore(),
        "cal/ECE": ExpectedCalibrationError(),
        "cal/MCE": MaximumCalibrationError(),
        "cal/aECE": AdaptiveCalibrationError(),
        "cal/cECE": ClasswiseCalibrationError(num_classes),
        "sc/AURC": AURC(),
        "sc/Cov_5Risk": CoverageAtRisk(0.05),
        "sc/Risk_80Cov": RiskAtCoverage(0.8),
        "mis/AUROC": MisclassificationAUROC(),
        "mis/AUPR": MisclassificationAUPR(),
        "mis/FPR95": MisclassificationFPR95(),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def sampled_regression_metrics(prefix: str) -> MetricCollection:
    """Metrics of a mixture over posterior samples.

    Update with the keyword arguments ``mean``, ``variance`` and ``target``, all of one shape, and ``log_densities [samples,
    batch]``, the log-densities of the targets under each sample.

    Args:
        prefix: Prefix of every key, including the slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under ``reg/RMSE``, in the unit of the target, and ``reg/NLL``, in nats per target value.
    """
    metrics: dict[str, Metric | MetricCollection] = {"reg/RMSE": RootMeanSquaredError(), "reg/NLL": MixtureNLL()}
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def observed_metrics(prefix: str) -> MetricCollection:
    """Those of `sampled_regression_metrics`, and ``reg/coverage`` and ``reg/width`` of intervals ``lower``, ``upper``."""
    metrics = sampled_regression_metrics(prefix)
    metrics.add_metrics({"reg/coverage": IntervalCoverage(), "reg/width": IntervalWidth()})
    return metrics
