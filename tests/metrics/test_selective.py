from __future__ import annotations

import itertools

import pytest
import torch

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.selective import AURC, CoverageAtRisk, RiskAtCoverage, risk_coverage
from lightning_bayes.metrics.top_label import top_label


def aurc(probs, targets):
    return AURC().set_dtype(probs.dtype)(probs, targets)


def coverage_at_risk(probs, targets, risk):
    return CoverageAtRisk(risk).set_dtype(probs.dtype)(probs, targets)


def risk_at_coverage(probs, targets, coverage):
    return RiskAtCoverage(coverage).set_dtype(probs.dtype)(probs, targets)


def confident(confidences, correct):
    confidences = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([confidences, 1 - confidences], -1), 1 - torch.tensor(correct)


def test_four_examples_by_hand():
    # By confidence: right, wrong, right, wrong. Risks 0, 1/2, 1/3, 2/4.
    probs, targets = confident([0.7, 0.9, 0.6, 0.8], [1, 1, 0, 0])
    assert aurc(probs, targets).item() == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)


@pytest.mark.parametrize(("correct", "expected"), [(1, 0.0), (0, 1.0)])
def test_all_correct_and_all_wrong_give_the_bounds(correct, expected):
    probs, targets = confident([0.7, 0.9, 0.6], [correct] * 3)
    assert aurc(probs, targets).item() == expected


def test_ties_count_as_the_mean_over_their_orders():
    correct = [1, 0, 0, 1]  # the first three share one confidence
    values = []
    for order in itertools.permutations(range(3)):
        errors = torch.tensor([1.0 - correct[i] for i in (*order, 3)])
        values.append((errors.cumsum(0) / torch.arange(1, 5)).mean().item())
    for order in itertools.permutations(range(4)):
        confidences = [(0.9, 0.9, 0.9, 0.6)[i] for i in order]
        probs, targets = confident(confidences, [correct[i] for i in order])
        assert aurc(probs, targets).item() == pytest.approx(sum(values) / len(values))


def predictions(batch=400, rounded=False):
    """Confidences that correlate with correctness, optionally with many ties."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(batch, 4, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    targets = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    if rounded:
        probs = (10 * probs).round() + 1e-3
        probs = probs / probs.sum(-1, keepdim=True)
    return probs, targets


def thresholds(probs, targets):
    """Coverage and risk of every rule "answer if the confidence is at least t", by counting."""
    confidence, correct = probs.amax(-1), probs.argmax(-1) == targets
    points = []
    for t in sorted(set(confidence.tolist()), reverse=True):
        answered = confidence >= t
        points.append((answered.double().mean().item(), 1 - correct[answered].double().mean().item()))
    return points


@pytest.mark.parametrize("rounded", [False, True])
def test_the_curve_equals_counting_at_every_threshold(rounded):
    probs, targets = predictions(rounded=rounded)
    expected = torch.tensor(thresholds(probs, targets), dtype=torch.float64)
    coverage, risk = risk_coverage(*top_label(probs, targets))
    assert len(coverage) < 400 if rounded else len(coverage) == 400
    torch.testing.assert_close(coverage.double(), expected[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(risk, expected[:, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.3, 0.8, 1.0])
def test_coverage_at_risk_and_risk_at_coverage_are_points_of_the_curve(share, rounded):
    probs, targets = predictions(rounded=rounded)
    points = thresholds(probs, targets)
    best = max([coverage for coverage, risk in points if risk <= share + 1e-12], default=0.0)
    first = next(risk for coverage, risk in points if coverage >= share - 1e-12)
    assert coverage_at_risk(probs, targets, share).item() == pytest.approx(best, abs=1e-6)
    assert risk_at_coverage(probs, targets, share).item() == pytest.approx(first, abs=1e-6)


def test_a_risk_equal_to_the_tolerated_one_is_allowed():
    probs, targets = confident([0.99 - 0.001 * i for i in range(100)], [1] * 71 + [0] * 29)
    assert coverage_at_risk(probs, targets, 0.29).item() == 1  # in binary, 0.29 * 100 is below 29
    assert coverage_at_risk(probs, targets, 0.28).item() == pytest.approx(0.98)  # 27 errors


def test_without_a_good_threshold_the_coverage_is_zero():
    probs, targets = confident([0.9, 0.8], [0, 0])
    assert coverage_at_risk(probs, targets, 0.05).item() == 0


@pytest.mark.parametrize("value", [-0.1, 5.0])
def test_values_outside_0_and_1_are_refused(value):
    for metric_class in (CoverageAtRisk, RiskAtCoverage):
        with pytest.raises(HyperparameterError, match=rf"={value} must be a fraction between 0 and 1; 5 % is 0\.05"):
            metric_class(value)
