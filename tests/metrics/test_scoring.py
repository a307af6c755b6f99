from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch.nn.functional import nll_loss

from lightning_bayes.metrics.scoring import Accuracy, brier_per_example, nll_per_example


def predictions(batch=200, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(batch, classes, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return probs, torch.randint(classes, (batch,), generator=generator)


def test_nll_equals_torch_and_scikit_learn():
    probs, targets = predictions()
    torch.testing.assert_close(nll_per_example(probs, targets), nll_loss(probs.log(), targets, reduction="none"))
    assert nll_per_example(probs, targets).mean().item() == pytest.approx(log_loss(targets, probs, labels=range(5)))


def test_a_target_of_probability_zero_costs_the_documented_amount():
    probs = torch.tensor([[1.0, 0.0]])
    assert nll_per_example(probs, torch.tensor([1])).item() == pytest.approx(126 * math.log(2))  # tiny is 2⁻¹²⁶
    assert nll_per_example(probs.double(), torch.tensor([1])).item() == pytest.approx(1022 * math.log(2))
    assert nll_per_example(probs.half(), torch.tensor([1])).item() == pytest.approx(126 * math.log(2))


def test_a_probability_rounded_above_one_has_no_negative_nll():
    assert nll_per_example(torch.tensor([[1.0000001, 0.0]]), torch.tensor([0])).item() == 0


@pytest.mark.parametrize(
    ("row", "target", "expected"),
    [([1.0, 0.0, 0.0], 0, 0.0), ([1.0, 0.0, 0.0], 1, 2.0), ([0.5, 0.3, 0.2], 1, 0.25 + 0.49 + 0.04)],
)
def test_brier_sums_the_squared_errors_of_all_classes(row, target, expected):
    assert brier_per_example(torch.tensor([row]), torch.tensor([target])).item() == pytest.approx(expected)


def test_accuracy_averages_over_examples_not_classes():
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    targets = torch.tensor([0, 0, 0, 1])  # the mean over classes would be 1/2
    metric = Accuracy(num_classes=2)
    metric.update(probs, targets)
    assert metric.compute().item() == pytest.approx(accuracy_score(targets, probs.argmax(-1)))
    assert metric.compute().item() == pytest.approx(0.75)
