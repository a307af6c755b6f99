from __future__ import annotations

import itertools

import pytest
import torch

from lightning_bayes.errors import NonFiniteError, ShapeError
from lightning_bayes.metrics.top_label import checked_probs, mean_over_ties, top_label


def test_confidence_is_the_largest_probability_and_correct_compares_its_class():
    probs = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.2, 0.3], [0.1, 0.1, 0.8]])
    seen = top_label(probs, torch.tensor([1, 2, 2]))
    assert seen.confidence.tolist() == pytest.approx([0.7, 0.5, 0.8])
    assert seen.correct.tolist() == [1, 0, 1]


def test_half_precision_becomes_single_and_double_is_kept():
    target = torch.zeros(4, dtype=torch.long)
    for dtype, expected in {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float64: torch.float64,
    }.items():
        generator = torch.Generator().manual_seed(0)
        probs = torch.randn(4, 10, generator=generator).softmax(-1).to(dtype)  # rows do not sum to one exactly
        assert checked_probs(probs, target).dtype == expected


def test_the_mean_over_ties_is_the_expectation_over_their_orders():
    keys = torch.tensor([0.9, 0.5, 0.9, 0.9, 0.5])
    values = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
    prefix_sums = []
    for order in itertools.permutations(range(5)):
        permuted = torch.tensor(order)
        by_key = keys[permuted].argsort(descending=True, stable=True)
        prefix_sums.append(values[permuted][by_key].cumsum(0))
    expected = torch.stack(prefix_sums).mean(0)
    got = mean_over_ties(keys, values)[keys.argsort(descending=True)].cumsum(0)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (torch.rand(4), torch.zeros(4).long(), r"probs \[batch, classes\].*got torch.float32 \[4\] and \[4\]"),
        (torch.rand(4, 2), torch.zeros(3).long(), r"\[4, 2\] and \[3\]. Flatten"),
        (torch.ones(4, 2).long(), torch.zeros(4).long(), r"floating-point probs .*got torch.int64"),
        (torch.full((2, 2), 0.5), torch.zeros(2), r"class indices, got torch.float32"),
        (torch.full((2, 2), 0.5), torch.tensor([0, 2]), r"indices from 0 to 1, but lie between 0 and 2"),
        (torch.full((2, 2), 0.5), torch.tensor([0, -1]), r"but lie between -1 and 0"),
        (torch.tensor([[0.5, 0.5], [3.0, -2.0]]), torch.tensor([0, 1]), r"Row 1 .* starts with \[3, -2\] .*softmax"),
        (torch.tensor([[0.5, 0.4]]), torch.tensor([0]), r"Row 0 .* sums to 0.9. .*not logits"),
    ],
)
def test_invalid_probabilities_are_refused(probs, targets, message):
    with pytest.raises(ShapeError, match=message):
        checked_probs(probs, targets)


def test_nan_is_not_reported_as_logits():
    probs = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan], [torch.nan, 0.4]])
    with pytest.raises(
        NonFiniteError, match=r"2 of 3 examples have probabilities that are nan, the first one in row 1\."
    ):
        checked_probs(probs, torch.tensor([0, 0, 0]))
