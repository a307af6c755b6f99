from __future__ import annotations

import itertools

import pytest
import torch

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics.selective import AURC, aurc


def confident(confidences, correct):
    confidences = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([confidences, 1 - confidences], -1), 1 - torch.tensor(correct)


def test_four_examples_by_hand():
    # By confidence: right, wrong, right, wrong. Risks 0, 1/2, 1/3, 2/4.
    probs, targets = confident([0.7, 0.9, 0.6, 0.8], [1, 1, 0, 0])
    assert aurc(probs, targets).item() == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)


@pytest.mark.parametrize(("correct", "expected"), [(1, 0.0), (0, 1.0)])
def test_all_right_and_all_wrong_are_the_bounds(correct, expected):
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


def test_the_shell_equals_the_function_on_uneven_batches():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(100, 4, generator=generator).softmax(-1)
    targets = torch.randint(4, (100,), generator=generator)
    shell = AURC()
    shell.update(probs[:1], targets[:1])
    shell.update(probs[1:], targets[1:])
    assert shell.compute().item() == pytest.approx(aurc(probs, targets).item(), rel=1e-6)


def test_the_shell_refuses_logits():
    with pytest.raises(ShapeError, match="take probabilities, not logits"):
        AURC().update(torch.tensor([[3.0, -1.0]]), torch.tensor([0]))
