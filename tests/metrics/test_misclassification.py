from __future__ import annotations

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from lightning_bayes.metrics.misclassification import (
    MisclassificationAUPR,
    MisclassificationAUROC,
    MisclassificationFPR95,
    misclassification_aupr,
    misclassification_auroc,
    misclassification_fpr95,
)


def fpr95(is_error, score):
    false_positive_rate, true_positive_rate, _ = roc_curve(is_error, score, drop_intermediate=False)
    return false_positive_rate[true_positive_rate >= 0.95].min()


FUNCTIONS = {
    misclassification_auroc: roc_auc_score,
    misclassification_aupr: average_precision_score,
    misclassification_fpr95: fpr95,
}
METRICS = dict(zip((MisclassificationAUROC, MisclassificationAUPR, MisclassificationFPR95), FUNCTIONS, strict=True))


def predictions(kind):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(500, 5, generator=generator)
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    sharper = {"smooth": 1.0, "saturated": 12.0}[kind]  # the latter has many confidences of exactly one
    return (sharper * logits).softmax(-1), targets


@pytest.mark.parametrize("kind", ["smooth", "saturated"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_equal_scikit_learn(function, kind):
    probs, targets = predictions(kind)
    is_error = probs.argmax(-1) != targets
    expected = FUNCTIONS[function](is_error, -probs.amax(-1))
    assert function(probs, targets).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("metric_class", METRICS)
def test_metrics_equal_their_functions_on_uneven_batches(metric_class):
    probs, targets = predictions("saturated")
    metric = metric_class()
    metric.update(probs[:7], targets[:7])
    metric.update(probs[7:], targets[7:])
    assert metric.compute().item() == pytest.approx(METRICS[metric_class](probs, targets).item(), abs=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_values_are_undefined_without_errors_or_without_correct_predictions(label):
    probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([label, label])
    for function in FUNCTIONS:
        assert function(probs, targets).isnan()
