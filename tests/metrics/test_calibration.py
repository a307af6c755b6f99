from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.calibration import (
    AdaptiveCalibrationError,
    ClasswiseCalibrationError,
    ExpectedCalibrationError,
    MaximumCalibrationError,
    expected_calibration_error,
    reliability_bins,
)


def maximum_calibration_error(probs, targets):
    return MaximumCalibrationError()(probs, targets)


def adaptive_calibration_error(probs, targets, bins=15):
    return AdaptiveCalibrationError(bins)(probs, targets)


def classwise_calibration_error(probs, targets):
    return ClasswiseCalibrationError(probs.shape[1])(probs, targets)


def predictions(batch=300, classes=4, seed=0, sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(batch, classes, generator=generator).mul(sharpness).softmax(-1)
    return probs, torch.randint(classes, (batch,), generator=generator)


def confident(confidences, correct):
    """Two-class probabilities with these confidences, and targets that make them correct or wrong."""
    confidences = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([confidences, 1 - confidences], -1), 1 - torch.tensor(correct)


def test_the_errors_of_three_bins_by_hand():
    # Of 15 bins, [0.6, 0.667) has accuracy 1/2 at 0.62, [0.8, 0.867) accuracy 1 at 0.82, the last one 0 at 0.99.
    probs, targets = confident([0.62, 0.62, 0.82, 0.99], [1, 0, 1, 0])
    assert expected_calibration_error(probs, targets).item() == pytest.approx((2 * 0.12 + 0.18 + 0.99) / 4)
    assert maximum_calibration_error(probs, targets).item() == pytest.approx(0.99)


def test_a_confidence_of_exactly_one_is_in_the_last_bin():
    probs, targets = confident([1.0, 0.96], [0, 1])  # torchmetrics alone: |0 - 1| / 2 + |1 - 0.96| / 2
    assert expected_calibration_error(probs, targets).item() == pytest.approx(abs(0.5 - 0.98))
    assert maximum_calibration_error(probs, targets).item() == pytest.approx(abs(0.5 - 0.98))


def test_a_probability_rounded_above_one_is_not_treated_as_a_logit():
    probs = torch.tensor([[1.0000001, 0.0], [0.8, 0.2]])
    targets = torch.tensor([0, 0])
    assert multiclass_calibration_error(probs, targets, 2).item() > 0.2  # a softmax of both rows
    assert expected_calibration_error(probs, targets).item() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(("norm", "function"), [("l1", expected_calibration_error), ("max", maximum_calibration_error)])
def test_errors_equal_torchmetrics_without_probabilities_of_one(norm, function):
    probs, targets = predictions(1000, sharpness=1.0)
    expected = multiclass_calibration_error(probs, targets, num_classes=4, n_bins=15, norm=norm)
    assert function(probs, targets).item() == pytest.approx(expected.item(), abs=1e-6)


def classwise_by_loops(probs, targets, bins):
    """As in netcal and Kull et al.: a reliability diagram for each class against the rest."""
    errors = []
    for label in range(probs.shape[1]):
        error = 0.0
        for number in range(bins):
            below = probs[:, label] < (number + 1) / bins if number < bins - 1 else np.full(len(probs), True)
            inside = (probs[:, label] >= number / bins) & below
            if inside.any():
                gap = (targets[inside] == label).mean() - probs[inside, label].mean()
                error += inside.mean() * abs(gap)
        errors.append(error)
    return np.mean(errors)


@pytest.mark.parametrize("sharpness", [1.0, 20.0])  # the latter has probabilities of exactly zero and one
def test_the_classwise_error_equals_a_loop_over_classes_and_bins(sharpness):
    probs, targets = predictions(1000, sharpness=sharpness)
    expected = classwise_by_loops(probs.double().numpy(), targets.numpy(), 15)
    assert classwise_calibration_error(probs, targets).item() == pytest.approx(expected, abs=1e-6)


def test_the_classwise_error_detects_a_wrong_second_class():
    probs = torch.tensor([[0.6, 0.4, 0.0]]).expand(10, 3)  # the top label is calibrated, the other four are class 2
    targets = torch.tensor([0] * 6 + [2] * 4)
    assert expected_calibration_error(probs, targets).item() == pytest.approx(0, abs=1e-6)
    assert classwise_calibration_error(probs, targets).item() == pytest.approx((0 + 0.4 + 0.4) / 3)


def test_reliability_bins_equal_scikit_learn():
    probs, targets = predictions()
    got = reliability_bins(probs, targets, bins=15)
    correct = probs.argmax(-1) == targets
    accuracy, confidence = calibration_curve(correct, probs.amax(-1), n_bins=15)
    filled = got.counts > 0
    assert got.counts.sum() == 300
    np.testing.assert_allclose(got.accuracy[filled], accuracy, atol=1e-6, rtol=0)
    np.testing.assert_allclose(got.confidence[filled], confidence, atol=1e-6, rtol=0)
    assert got.accuracy[~filled].isnan().all()
    assert got.confidence[~filled].isnan().all()


def test_the_ece_is_the_sum_over_the_reliability_bins():
    probs, targets = predictions(sharpness=20.0)  # many confidences are exactly one
    assert (probs == 1).any()
    bins = reliability_bins(probs, targets)
    gaps = (bins.accuracy - bins.confidence).abs().nan_to_num()
    assert expected_calibration_error(probs, targets).item() == pytest.approx((gaps * bins.counts).sum().item() / 300)
    assert maximum_calibration_error(probs, targets).item() == pytest.approx(gaps.max().item())


@pytest.mark.parametrize("batch", [300, 307, 7])  # a multiple of the bins, not a multiple, fewer than bins
def test_adaptive_error_equals_a_loop_over_equal_mass_bins(batch):
    probs, targets = predictions(batch)
    confidence, correct = probs.amax(-1).numpy(), (probs.argmax(-1) == targets).numpy()
    expected = 0.0
    for mass in np.array_split(np.argsort(confidence), 15):
        if len(mass):
            expected += len(mass) / batch * abs(correct[mass].mean() - confidence[mass].mean())
    assert adaptive_calibration_error(probs, targets).item() == pytest.approx(expected, abs=1e-6)


def test_adaptive_error_does_not_depend_on_the_order_of_ties():
    probs, targets = confident([0.8] * 6, [1, 1, 1, 0, 0, 0])
    for order in (torch.arange(6), torch.arange(6).flip(0), torch.tensor([0, 3, 1, 4, 2, 5])):
        got = adaptive_calibration_error(probs[order], targets[order], bins=3)
        assert got.item() == pytest.approx(0.3)


def test_zero_bins_are_refused():
    probs, targets = predictions(4)
    message = r"at least one bin, got bins=0\. The usual number is 15"
    for function in (expected_calibration_error, reliability_bins):
        with pytest.raises(HyperparameterError, match=message):
            function(probs, targets, bins=0)
    for metric in (ExpectedCalibrationError, MaximumCalibrationError, AdaptiveCalibrationError):
        with pytest.raises(HyperparameterError, match=message):
            metric(bins=0)
    with pytest.raises(HyperparameterError, match=message):
        ClasswiseCalibrationError(num_classes=2, bins=0)


@pytest.mark.parametrize(
    "metric", [ExpectedCalibrationError(), MaximumCalibrationError(), ClasswiseCalibrationError(num_classes=4)]
)
def test_states_over_equal_width_bins_do_not_grow(metric):
    before = {name: value.shape for name, value in metric.metric_state.items()}
    metric.update(*predictions())
    assert {name: value.shape for name, value in metric.metric_state.items()} == before
