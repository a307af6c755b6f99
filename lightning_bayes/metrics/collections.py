"""The metrics of a task in one `torchmetrics.MetricCollection`, under the keys that dashboards of the field expect.

Each collection goes whole into Lightning: update it in ``test_step``, then ``self.log_dict(collection)``.

No metric shares its states with another (torchmetrics' compute groups): torchmetrics finds such groups by comparing the
states after the first batch, and would couple the NLL to the Brier score for good where both are zero, on a batch of
perfect predictions; and in groups given by hand, calling the collection (``forward``) loses earlier batches if the
first member of a group is not the first in alphabetical order.
"""

from __future__ import annotations

from torchmetrics import MetricCollection

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.calibration import (
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
)
from lightning_bayes.metrics.misclassification import (
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
)
from lightning_bayes.metrics.ood import OODAUPR, OODAUROC, OODFPR95
from lightning_bayes.metrics.regression import GaussianNLL, MixtureNLL, RootMeanSquaredError
from lightning_bayes.metrics.scoring import Accuracy, BrierScore, NegativeLogLikelihood
from lightning_bayes.metrics.selective import AURC, CoverageAtRisk, RiskAtCoverage


def classification_metrics(num_classes: int, prefix: str) -> MetricCollection:
    """Accuracy and proper scores, calibration errors (15 bins), selective prediction, detection of the model's own errors.

    Update with ``(probs [batch, classes], targets [batch])``: probabilities, not logits.

    Args:
        num_classes: Number of classes, at least two.
        prefix: Prefix of every key, with its slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics, each after the prefix, under ``cls/Acc``, ``cls/NLL`` (nats), ``cls/Brier`` (sum over classes);
        ``cal/ECE``, ``cal/MCE``, ``cal/aECE`` (adaptive), ``cal/cECE`` (class-wise); ``sc/AURC``, ``sc/Cov_5Risk`` and
        ``sc/Risk_80Cov`` (coverage at a risk of 5 %, risk at a coverage of 80 %); and ``mis/AUROC, mis/AUPR, mis/FPR95``
        of misclassifications, which are ``nan`` without an error.

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
    return MetricCollection(
        {
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
        },
        prefix=prefix,
        compute_groups=False,
    )


def ood_metrics(prefix: str = "ood/") -> MetricCollection:
    """AUROC, average precision and false-positive rate at 95 % true-positive rate; OOD is the positive class.

    Update with ``(scores [batch], is_ood [batch])``: a higher score means more OOD, labels are truth values or 0/1.

    Args:
        prefix: Prefix of every key, with its slash.

    Returns:
        Metrics under ``AUROC, AUPR, FPR95``, each after the prefix.

    Example:
        >>> import torch
        >>> metrics = ood_metrics()
        >>> metrics.update(torch.tensor([0.1, 2.0]), torch.tensor([False, True]))
        >>> metrics.compute()
        {'ood/AUPR': tensor(1.), 'ood/AUROC': tensor(1.), 'ood/FPR95': tensor(0.)}
    """
    return MetricCollection(
        {"AUROC": OODAUROC(), "AUPR": OODAUPR(), "FPR95": OODFPR95()},
        prefix=prefix,
        compute_groups=False,
    )


def regression_metrics(prefix: str) -> MetricCollection:
    """Root mean squared error, in the unit of the target, and Gaussian NLL per point, in nats.

    Update with ``(mean, variance, target)``, all of one shape; the variance is that of the target.

    Args:
        prefix: Prefix of every key, with its slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under ``reg/RMSE, reg/NLL``, each after the prefix.

    Example:
        >>> import torch
        >>> metrics = regression_metrics("test/")
        >>> metrics.update(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]))
        >>> metrics.compute()
        {'test/reg/NLL': tensor(1.4189), 'test/reg/RMSE': tensor(1.)}
    """
    return MetricCollection(
        {"reg/RMSE": RootMeanSquaredError(), "reg/NLL": GaussianNLL()},
        prefix=prefix,
        compute_groups=False,
    )


def sampled_regression_metrics(prefix: str) -> MetricCollection:
    """The metrics of `regression_metrics` for a prediction that is a mixture over posterior samples.

    Update by name with ``mean``, ``variance`` and ``target`` as there, and ``log_densities [samples, batch]`` of the
    targets under each sample.

    Args:
        prefix: Prefix of every key, with its slash: ``"val/"`` or ``"test/"``.

    Returns:
        Metrics under ``reg/RMSE, reg/NLL``, each after the prefix; NLL is that of the mixture, point by point.

    Example:
        >>> import torch
        >>> metrics = sampled_regression_metrics("test/")
        >>> one = torch.ones(1)
        >>> metrics.update(mean=one, variance=one, target=one, log_densities=torch.tensor([[0.5], [0.1]]).log())
        >>> metrics.compute()
        {'test/reg/NLL': tensor(1.2040), 'test/reg/RMSE': tensor(0.)}
    """
    return MetricCollection(
        {"reg/RMSE": RootMeanSquaredError(), "reg/NLL": MixtureNLL()},
        prefix=prefix,
        compute_groups=False,
    )
