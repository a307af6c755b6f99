"""Differences of scores on the same examples, against resampled examples and the paired t-test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from sklearn.metrics import accuracy_score, log_loss

from lightning_bayes.metrics import expected_calibration_error
from lightning_bayes.metrics.example_scores import paired_differences, write_scores
from lightning_bayes.metrics.paired import PairedClassification, PairedRegression

EXAMPLES, CLASSES, RESAMPLES = 1500, 4, 400


def predictions():
    """Class probabilities of two related classifiers, the first less confident, and targets."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    logits = 3 * torch.randn(EXAMPLES, CLASSES, generator=generator, dtype=torch.float64)
    logits[torch.arange(EXAMPLES), targets] += 2
    other = logits + 0.7 * torch.randn(EXAMPLES, CLASSES, generator=generator)
    return (logits / 1.6).softmax(-1), other.softmax(-1), targets


def classified(first, second, targets):
    scores = PairedClassification()
    for rows in torch.arange(len(targets)).split(400):
        scores.update(first[rows], second[rows], targets[rows])
    return scores


def test_scores_are_those_of_each_prediction():
    first, second, targets = predictions()
    found = classified(first, second, targets).compute()
    assert list(found) == ["cls/Acc", "cls/NLL", "cal/ECE"]
    for index, probs in enumerate((first, second)):
        assert found["cls/Acc"][index] == pytest.approx(accuracy_score(targets, probs.argmax(-1)))
        assert found["cls/NLL"][index] == pytest.approx(log_loss(targets, probs), rel=1e-5)
        assert found["cal/ECE"][index] == pytest.approx(expected_calibration_error(probs, targets).item(), rel=1e-5)


def test_the_error_of_a_mean_is_that_of_the_paired_t_test():
    first, second, targets = predictions()
    found = classified(first, second, targets).compute()["cls/NLL"]
    rows = torch.arange(EXAMPLES)
    statistic = ttest_rel(-first[rows, targets].double().log(), -second[rows, targets].double().log()).statistic
    expected = abs((found.first - found.second) / statistic) * math.sqrt((EXAMPLES - 1) / EXAMPLES)
    assert found.error == pytest.approx(expected, rel=1e-4)


def test_the_error_of_the_ece_is_the_spread_over_resampled_examples():
    first, second, targets = predictions()
    found = classified(first, second, targets).compute()["cal/ECE"]
    generator, differences = torch.Generator().manual_seed(1), []
    for _ in range(RESAMPLES):
        rows = torch.randint(EXAMPLES, (EXAMPLES,), generator=generator)
        both = (expected_calibration_error(probs[rows], targets[rows]).item() for probs in (first, second))
        differences.append(next(both) - next(both))
    # The standard error of a standard deviation, and 10 % for gaps that change their sign.
    assert found.error == pytest.approx(np.std(differences), rel=4 / math.sqrt(2 * RESAMPLES) + 0.1)


def test_the_error_of_the_rmse_is_the_spread_over_resampled_examples():
    generator = torch.Generator().manual_seed(2)
    targets, first, noise = torch.randn(3, EXAMPLES, generator=generator)
    second = first + 0.5 * noise
    scores = PairedRegression()
    scores.update(first, second, targets)
    found = scores.compute()["reg/RMSE"]
    assert found.first == pytest.approx((first - targets).square().mean().sqrt().item(), rel=1e-6)
    differences = []
    for _ in range(RESAMPLES):
        rows = torch.randint(EXAMPLES, (EXAMPLES,), generator=generator)
        roots = [(mean[rows] - targets[rows]).square().mean().sqrt().item() for mean in (first, second)]
        differences.append(roots[0] - roots[1])
    assert found.error == pytest.approx(np.std(differences), rel=4 / math.sqrt(2 * RESAMPLES))


def test_log_densities_give_the_nll_of_each_prediction():
    values = torch.tensor([1.0, 2.0, 4.0])
    scores = PairedRegression()
    scores.update(values, values, values, -values, torch.zeros(3))
    found = scores.compute()["reg/NLL"]
    assert (found.first, found.second) == pytest.approx((7 / 3, 0.0))
    assert found.error == pytest.approx(values.std(correction=0).item() / math.sqrt(3))


def test_labels_of_one_example_count_as_one_example():
    """Repeating each example's labels leaves scores and errors as they are."""
    first, second, targets = predictions()
    once = classified(first, second, targets).compute()
    scores = PairedClassification()
    scores.update(*(values.unsqueeze(1).expand(-1, 5, *values.shape[1:]) for values in (first, second, targets)))
    for name, paired in scores.compute().items():
        assert tuple(paired) == pytest.approx(tuple(once[name]), rel=1e-5), name


def test_equal_predictions_do_not_differ_and_no_examples_have_no_scores():
    first, _, targets = predictions()
    assert not any(paired.differs for paired in classified(first, first, targets).compute().values())
    assert PairedClassification().compute() == {}


def test_sums_of_processes_give_the_scores_of_all_examples():
    first, second, targets = predictions()
    halves = [slice(0, 500), slice(500, None)]
    parts = [classified(first[rows], second[rows], targets[rows]) for rows in halves]
    other = []
    parts[1].compute(lambda total: other.append(total) or total)
    found = parts[0].compute(lambda total: total + other[0])
    for name, paired in classified(first, second, targets).compute().items():
        assert tuple(found[name]) == pytest.approx(tuple(paired)), name


def test_scores_in_files_are_compared_like_predictions(tmp_path):
    first, second, targets = predictions()
    for name, probs in (("a", first), ("b", second)):
        write_scores(tmp_path / name, probs, targets)
    paired = PairedClassification()
    paired.update(second, first, targets)
    found = paired_differences(tmp_path / "a", tmp_path / "b")
    for key, expected in paired.compute().items():
        assert found[key].value == pytest.approx(expected.first - expected.second, abs=1e-6), key
        assert found[key].error == pytest.approx(expected.error, rel=0.01), key
