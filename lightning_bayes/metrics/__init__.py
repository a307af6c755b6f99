"""Metrics and figures of uncertainty: pure functions of probabilities with torchmetrics classes around them."""

from __future__ import annotations

from lightning_bayes.metrics.calibration import (
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
    ReliabilityBins,
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    reliability_bins,
)
from lightning_bayes.metrics.collections import (
    classification_metrics,
    observed_metrics,
    ood_metrics,
    regression_metrics,
    sampled_regression_metrics,
)
from lightning_bayes.metrics.detection import (
    OODAUPR,
    OODAUROC,
    OODFPR95,
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
    misclassification_aupr,
    misclassification_auroc,
    misclassification_fpr95,
    ood_aupr,
    ood_auroc,
    ood_fpr95,
)
from lightning_bayes.metrics.figure_certainty import certainty_sheet
from lightning_bayes.metrics.figure_curves import risk_coverage_diagram, shift_curves
from lightning_bayes.metrics.figure_histograms import entropy_histogram, score_histograms
from lightning_bayes.metrics.figure_reliability import reliability_diagram
from lightning_bayes.metrics.ood_detection import OODDetection
from lightning_bayes.metrics.regression import (
    GaussianNLL,
    IntervalCoverage,
    IntervalWidth,
    MixtureNLL,
    RootMeanSquaredError,
    gaussian_nll,
    mixture_nll,
)
from lightning_bayes.metrics.scoring import (
    Accuracy,
    BrierScore,
    NegativeLogLikelihood,
    brier_per_example,
    nll_per_example,
)
from lightning_bayes.metrics.selective import (
    AURC,
    CoverageAtRisk,
    RiskAtCoverage,
    RiskCoverage,
    aurc,
    coverage_at_risk,
    risk_at_coverage,
    risk_coverage,
)
from lightning_bayes.metrics.shift import ShiftMetrics, by_severity

__all__ = [
    "AURC",
    "OODAUPR",
    "OODAUROC",
    "OODFPR95",
    "Accuracy",
    "AdaptiveCalibrationError",
    "BrierScore",
    "ClasswiseCalibrationError",
    "CoverageAtRisk",
    "ExpectedCalibrationError",
    "GaussianNLL",
    "IntervalCoverage",
    "IntervalWidth",
    "MaximumCalibrationError",
    "MisclassificationAUPR",
    "MisclassificationAUROC",
    "MisclassificationFPR95",
    "MixtureNLL",
    "NegativeLogLikelihood",
    "OODDetection",
    "ReliabilityBins",
    "RiskAtCoverage",
    "RiskCoverage",
    "RootMeanSquaredError",
    "ShiftMetrics",
    "adaptive_calibration_error",
    "aurc",
    "brier_per_example",
    "by_severity",
    "certainty_sheet",
    "classification_metrics",
    "classwise_calibration_error",
    "coverage_at_risk",
    "entropy_histogram",
    "expected_calibration_error",
    "gaussian_nll",
    "maximum_calibration_error",
    "misclassification_aupr",
    "misclassification_auroc",
    "misclassification_fpr95",
    "mixture_nll",
    "nll_per_example",
    "observed_metrics",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr95",
    "ood_metrics",
    "regression_metrics",
    "reliability_bins",
    "reliability_diagram",
    "risk_at_coverage",
    "risk_coverage",
    "risk_coverage_diagram",
    "sampled_regression_metrics",
    "score_histograms",
    "shift_curves",
]
