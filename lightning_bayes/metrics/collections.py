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
    OODAUPR,
    OODAUROC,
    OODFPR95,
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
)
from lightning_bayes.metrics.regression import (
    GaussianNLL,
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

    Example:
        >>> import torch
        >>> metrics = classification_metrics(num_classes=2, prefix="test/")
        >>> metrics.update(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 1]))
        >>> {key: round(value.item(), 4) for key, value in metrics.compute().items()}  # doctest: +NORMALIZE_WHITESPACE
        {'test/cal/ECE': 0.25, 'test/cal/MCE': 0.25, 'test/cal/aECE': 0.25, 'test/cal/cECE': 0.25, 'test/cls/Acc': 1.0,
         'test/cls/Brier': 0.125, 'test/cls/NLL': 0.2877, 'test/mis/AUPR': nan, 'test/mis/AUROC': nan,
         'test/mis/FPR95': nan, 'test/sc/AURC': 0.0, 'test/sc/Cov_5Risk': 1.0, 'test/sc/Risk_80Cov': 0.0}
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
    return _collection(metrics, prefix)


def ood_metrics(prefix: str = "ood/") -> MetricCollection:
    """AUROC, average precision and false-positive rate at 95 % true-positive rate; OOD is the positive class.

    Update with ``(scores [batch], is_ood [batch])``: a higher score means more OOD, labels are booleans or 0/1.

    Args:
        prefix: Prefix of every key, including the slash.

    Returns:
        Metrics under ``AUROC``, ``AUPR`` and ``FPR95`` after the prefix.

    Example:
        >>> import torch
        >>> metrics = ood_metrics()
        >>> metrics.update(torch.tensor([0.1, 2.0]), torch.tensor([False, True]))
        >>> metrics.compute()
        {'ood/AUPR': tensor(1.), 'ood/AUROC': tensor(1.), 'ood/FPR95': tensor(0.)}
    """
    return _collection({"AUROC": OODAUROC(), "AUPR": OODAUPR(), "FPR95": OODFPR95()}, prefix)


def regression_metrics(prefix: str) -> MetricCollection:
    """Root mean squared error, in the unit of the target, and Gaussian NLL per target value, in nats.

    Update with ``(mean, variance, target)``, all of one shape. The variance includes the observation noise.

    Args:
        prefix: Prefix of every key, including the slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under ``reg/RMSE`` and ``reg/NLL`` after the prefix.

    Example:
        >>> import torch
        >>> metrics = regression_metrics("test/")
        >>> metrics.update(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]))
        >>> metrics.compute()
        {'test/reg/NLL': tensor(1.4189), 'test/reg/RMSE': tensor(1.)}
    """
    return _collection({"reg/RMSE": RootMeanSquaredError(), "reg/NLL": GaussianNLL()}, prefix)


def sampled_regression_metrics(prefix: str) -> MetricCollection:
    """The metrics of `regression_metrics` for a prediction that is a mixture over posterior samples.

    Update with the keyword arguments ``mean``, ``variance`` and ``target``, as in `regression_metrics`, and
    ``log_densities [samples, batch]``, the log-densities of the targets under each sample.

    Args:
        prefix: Prefix of every key, including the slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under ``reg/RMSE`` and ``reg/NLL`` after the prefix. The NLL is the mixture's; see `mixture_nll`.

    Example:
        >>> import torch
        >>> metrics = sampled_regression_metrics("test/")
        >>> one = torch.ones(1)
        >>> metrics.update(mean=one, variance=one, target=one, log_densities=torch.tensor([[0.5], [0.1]]).log())
        >>> metrics.compute()
        {'test/reg/NLL': tensor(1.2040), 'test/reg/RMSE': tensor(0.)}
    """
    return _collection({"reg/RMSE": RootMeanSquaredError(), "reg/NLL": MixtureNLL()}, prefix)


def observed_metrics(prefix: str) -> MetricCollection:
    """The metrics of `sampled_regression_metrics`, and the coverage and mean width of intervals.

    Update with the keyword arguments of `sampled_regression_metrics`, and ``lower`` and ``upper``, the intervals' ends.

    Args:
        prefix: Prefix of every key, including the slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under ``reg/RMSE``, ``reg/NLL``, ``reg/coverage`` and ``reg/width`` after the prefix.

    Example:
        >>> import torch
        >>> metrics, one = observed_metrics("test/"), torch.ones(1)
        >>> metrics.update(
        ...     mean=one, variance=one, target=one, lower=one - 1, upper=one + 1, log_densities=torch.zeros(1, 1)
        ... )
        >>> sorted(metrics.compute())
        ['test/reg/NLL', 'test/reg/RMSE', 'test/reg/coverage', 'test/reg/width']
    """
    metrics: dict[str, Metric | MetricCollection] = {
        "reg/RMSE": RootMeanSquaredError(),
        "reg/NLL": MixtureNLL(),
        "reg/coverage": IntervalCoverage(),
        "reg/width": IntervalWidth(),
    }
    return _collection(metrics, prefix)


def _collection(metrics: dict[str, Metric | MetricCollection], prefix: str) -> MetricCollection:
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)
