from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch.nn.functional import nll_loss

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics.scoring import (
    Accuracy,
    BrierScore,
    NegativeLogLikelihood,
    brier_per_example,
    nll_per_example,
)


def predictions(batch=200, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(batch, classes, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return probs, torch.randint(classes, (batch,), generator=generator)


def test_nll_equals_torch_and_scikit_learn():
    probs, targets = predictions()
    torch.testing.assert_close(nll_per_example(probs, targets), nll_loss(probs.log(), targets, reduction="none"))
    assert nll_per_example(probs, targets).mean().item() == pytest.approx(log_loss(targets, probs, labels=range(5)))


def test_an_impossible_target_costs_the_documented_amount():
    probs = torch.tensor([[1.0, 0.0]])
    assert nll_per_example(probs, torch.tensor([1])).item() == pytest.approx(126 * math.log(2))  # tiny is 2⁻¹²⁶
    assert nll_per_example(probs.double(), torch.tensor([1])).item() == pytest.approx(1022 * math.log(2))
    assert nll_per_example(probs.half(), torch.tensor([1])).item() == pytest.approx(126 * math.log(2))


def test_a_probability_above_one_by_rounding_does_not_give_a_negative_nll():
    assert nll_per_example(torch.tensor([[1.0000001, 0.0]]), torch.tensor([0])).item() == 0


@pytest.mark.parametrize(
    ("row", "target", "expected"),
    [([1.0, 0.0, 0.0], 0, 0.0), ([1.0, 0.0, 0.0], 1, 2.0), ([0.5, 0.3, 0.2], 1, 0.25 + 0.49 + 0.04)],
)
def test_brier_sums_the_squared_errors_of_all_classes(row, target, expected):
    assert brier_per_example(torch.tensor([row]), torch.tensor([target])).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "function"), [(NegativeLogLikelihood, nll_per_example), (BrierScore, brier_per_example)]
)
def test_a_shell_is_the_mean_over_examples_of_uneven_batches(metric, function):
    probs, targets = predictions()
    shell = metric()
    shell.update(probs[:3], targets[:3])
    shell.update(probs[3:], targets[3:])
    assert shell.compute().item() == pytest.approx(function(probs, targets).mean().item(), rel=1e-6)


def test_the_reset_shell_has_forgotten_everything():
    shell = BrierScore()
    shell.update(*predictions(seed=1))
    shell.reset()
    shell.update(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert shell.compute().item() == 2


def test_accuracy_is_over_examples_and_not_over_classes():
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    targets = torch.tensor([0, 0, 0, 1])  # the mean over classes would be 1/2
    shell = Accuracy(num_classes=2)
    shell.update(probs, targets)
    assert shell.compute().item() == pytest.approx(accuracy_score(targets, probs.argmax(-1)))
    assert shell.compute().item() == pytest.approx(0.75)


def test_shells_refuse_logits():
    logits = torch.tensor([[3.0, -1.0]])
    for shell in (NegativeLogLikelihood(), BrierScore(), Accuracy(num_classes=2)):
        with pytest.raises(ShapeError, match=r"take probabilities, not logits: pass logits.softmax\(-1\)"):
            shell.update(logits, torch.tensor([0]))
