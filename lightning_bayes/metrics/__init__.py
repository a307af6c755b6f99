"""Metrics and figures of uncertainty: pure functions of probabilities with torchmetrics classes around them."""

from __future__ import annotations

from lightning_bayes.metrics.calibration import (
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
    expected_calibration_error,
)
from lightning_bayes.metrics.collections import (
    classification_metrics,
    observed_metrics,
    sampled_regression_metrics,
)
from lightning_bayes.metrics.detection import (
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
    OODDetection,
    ood_aupr,
    ood_auroc,
    ood_fpr95,
)
from lightning_bayes.metrics.figure_curves import risk_coverage_diagram, shift_curves
from lightning_bayes.metrics.figure_histograms import score_histograms
from lightning_bayes.metrics.figure_reliability import reliability_diagram
from lightning_bayes.metrics.regression import (
    IntervalCoverage,
    IntervalWidth,
    MixtureNLL,
    RootMeanSquaredError,
)
from lightning_bayes.metrics.scoring import (
    Accuracy,
    BrierScore,
    NegativeLogLikelihood,
)
from lightning_bayes.metrics.selective import (
    AURC,
    CoverageAtRisk,
    RiskAtCoverage,
)
from lightning_bayes.metrics.shift import ShiftMetrics, by_severity

__all__ = [
    "AURC",
    "Accuracy",
    "AdaptiveCalibrationError",
    "BrierScore",
    "ClasswiseCalibrationError",
    "CoverageAtRisk",
    "ExpectedCalibrationError",
    "IntervalCoverage",
    "IntervalWidth",
    "MaximumCalibrationError",
    "MisclassificationAUPR",
    "MisclassificationAUROC",
    "MisclassificationFPR95",
    "MixtureNLL",
    "NegativeLogLikelihood",
    "OODDetection",
    "RiskAtCoverage",
    "RootMeanSquaredError",
    "ShiftMetrics",
    "by_severity",
    "classification_metrics",
    "expected_calibration_error",
    "observed_metrics",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr95",
    "reliability_diagram",
    "risk_coverage_diagram",
    "sampled_regression_metrics",
    "score_histograms",
    "shift_curves",
]
