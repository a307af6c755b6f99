"""Entropy and mutual information of mixtures with closed-form values."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical

from lightning_bayes.errors import ShapeError
from lightning_bayes.predictive import entropy, mutual_information


def binary_entropy(p):
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_entropy_matches_torch_distributions(generator):
    probs = torch.rand(4, 5, 7, generator=generator).softmax(-1)
    torch.testing.assert_close(entropy(probs), Categorical(probs=probs).entropy())
    torch.testing.assert_close(entropy(probs.movedim(-1, 1), 1), Categorical(probs=probs).entropy())


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_entropy_of_certainty_is_zero_and_of_ignorance_log_classes(classes):
    both = torch.stack([torch.eye(classes)[0], torch.full((classes,), 1 / classes)])
    torch.testing.assert_close(entropy(both), torch.tensor([0.0, math.log(classes)]))


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_samples_that_are_certain_of_different_classes_disagree_completely(classes):
    """C one-hot samples: the label would tell which sample it was, log C nats."""
    samples = torch.eye(classes)[:, None]
    torch.testing.assert_close(mutual_information(samples), torch.tensor([math.log(classes)]))


def test_samples_that_agree_carry_no_information(generator):
    probs = torch.rand(1, 6, 4, generator=generator).softmax(-1).expand(5, 6, 4)
    found = mutual_information(probs)
    assert found.min() >= 0  # rounding does not make it negative
    torch.testing.assert_close(found, torch.zeros(6), atol=1e-6, rtol=0)


@pytest.mark.parametrize("p", [0.6, 0.9, 0.999])
def test_two_mirrored_samples(p):
    """[p, 1-p] and [1-p, p] average to a fair coin: I = log 2 - h(p)."""
    samples = torch.tensor([[[p, 1 - p]], [[1 - p, p]]], dtype=torch.float64)
    expected = torch.tensor([math.log(2) - binary_entropy(p)], dtype=torch.float64)
    torch.testing.assert_close(mutual_information(samples), expected)


def test_a_mixture_of_certainty_and_a_fair_coin():
    """[1, 0] and [½, ½]: H[¾] total, half of log 2 within the samples."""
    samples = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]], dtype=torch.float64)
    expected = torch.tensor([binary_entropy(0.75) - 0.5 * math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(mutual_information(samples), expected)


@pytest.mark.parametrize("dim", [2, -2])
def test_classes_before_pixels(dim, generator):
    probs = torch.rand(5, 3, 4, 6, generator=generator, dtype=torch.float64).softmax(2)  # [S, B, C, pixels]
    found = mutual_information(probs, dim)
    assert found.shape == (3, 6)
    for pixel in range(6):
        torch.testing.assert_close(found[:, pixel], mutual_information(probs[..., pixel]))


def test_probabilities_without_a_sample_dimension_are_refused():
    with pytest.raises(ShapeError, match=r"shape \(4, 3\); expected \[samples, batch, …, classes\]"):
        mutual_information(torch.full((4, 3), 1 / 3))
