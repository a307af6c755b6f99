"""Acquisition functions against enumeration of labels and batches, and against sampling laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.predictive import (
    bald,
    batch_bald,
    joint_information,
    power_bald,
    power_rows,
    predictive_entropy,
    top_rows,
    variance_score,
)


@pytest.fixture
def pool(generator):
    """Five samples that disagree on seven rows with three classes."""
    return (2.5 * torch.randn(5, 7, 3, generator=generator, dtype=torch.float64)).softmax(-1)


def information(probs, rows):
    """I(y_rows; θ) in a loop over all labels and samples, from I = Σ_y E_s p_s(y) log(p_s(y) / p̄(y))."""
    samples, _, classes = probs.shape
    total = 0.0
    for labels in itertools.product(range(classes), repeat=len(rows)):
        each = [math.prod(float(probs[s, r, y]) for r, y in zip(rows, labels, strict=True)) for s in range(samples)]
        mean = sum(each) / samples
        total += sum(p / samples * math.log(p / mean) for p in each)
    return total


def greedy(probs, size):
    chosen = []
    for _ in range(size):
        left = [row for row in range(probs.shape[1]) if row not in chosen]
        chosen.append(max(left, key=lambda row: information(probs, [*chosen, row])))
    return chosen


def test_bald_is_the_information_of_one_label(pool):
    expected = [information(pool, [row]) for row in range(7)]
    torch.testing.assert_close(bald(pool), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("rows", [[0], [2, 5], [1, 3, 6], [0, 1, 2, 4]])
def test_joint_information_matches_enumeration_of_all_labels(pool, rows):
    assert joint_information(pool[:, rows]).item() == pytest.approx(information(pool, rows), rel=1e-9)


def test_batch_bald_matches_greedy_enumeration(pool):
    assert batch_bald(pool, 4).tolist() == greedy(pool, 4)


def test_the_greedy_batch_reaches_its_guarantee(pool):
    """Nemhauser et al. 1978: a greedy batch of a submodular score has at least 1 - 1/e of the best score."""
    best = max(information(pool, rows) for rows in itertools.combinations(range(7), 3))
    found = information(pool, batch_bald(pool, 3).tolist())
    assert (1 - 1 / math.e) * best <= found <= best + 1e-12


def test_drawn_configurations_estimate_the_enumerated_entropy(pool, monkeypatch):
    """The gain of a fourth row, estimated from 20 000 draws instead of enumeration."""
    from lightning_bayes.predictive import acquisition

    rows = [0, 3, 5]
    exact = torch.tensor([information(pool, [*rows, row]) - information(pool, rows) for row in (1, 2, 4, 6)])
    joint = acquisition._drawn(pool[:, rows], 20_000, torch.Generator().manual_seed(1))
    weight = 1 / (20_000 * joint.mean(0))
    conditional = predictive_entropy(pool[:, :, :].flatten(0, 1)[None]).view(5, 7).mean(0)
    before = information(pool, rows) + float(conditional[rows].sum())
    found = (acquisition._joint_entropies(joint, weight, pool) - before - conditional)[[1, 2, 4, 6]]
    torch.testing.assert_close(found.float(), exact.float(), atol=0.02, rtol=0)


def test_batch_bald_with_draws_matches_enumeration_for_distinct_rows():
    """Samples are the four corners of two bits; rows say bit 0, bit 0 again, bit 1, or nothing."""
    bits = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    sure = 0.02 + 0.96 * torch.eye(2)
    probs = torch.stack([sure[bits[:, 0]], sure[bits[:, 0]], sure[bits[:, 1]], torch.full((4, 2), 0.5)], 1)
    found = batch_bald(probs, 3, configurations=3, generator=torch.Generator().manual_seed(0))
    assert set(found[:2].tolist()) == {0, 2}
    assert found.tolist()[:2] == batch_bald(probs, 2).tolist()


def test_large_pools_are_scored_in_chunks(pool, monkeypatch):
    whole = batch_bald(pool, 3)
    monkeypatch.setattr("lightning_bayes.predictive.acquisition.PRODUCT_ELEMENTS", 1)
    assert torch.equal(batch_bald(pool, 3), whole)


def test_variance_score_sums_over_outputs(generator):
    samples = torch.randn(6, 4, 2, 3, generator=generator)
    torch.testing.assert_close(variance_score(samples), samples.var(0, correction=0).sum((1, 2)))
    torch.testing.assert_close(variance_score(samples[..., 0, 0]), samples[..., 0, 0].var(0, correction=0))


def test_predictive_entropy_is_the_entropy_of_the_average(pool):
    expected = torch.distributions.Categorical(probs=pool.mean(0)).entropy()
    torch.testing.assert_close(predictive_entropy(pool), expected)


@pytest.mark.parametrize("power", [0.0, 1.0, 3.0])
def test_power_rows_draw_in_proportion_to_the_power_of_the_score(power, generator):
    scores = torch.tensor([0.1, 0.2, 0.4])
    count = 4000
    draws = torch.stack([power_rows(scores, 1, power=power, generator=generator) for _ in range(count)])[:, 0]
    shares = scores**power / (scores**power).sum()
    errors = (torch.bincount(draws, minlength=3) / count - shares) / (shares * (1 - shares) / count).sqrt()
    assert errors.abs().max() < 4


def test_the_second_draw_excludes_the_first(generator):
    """P(first, second) = w_i w_j / (W (W - w_i)), here for the pair (2, 1)."""
    weights, count = torch.tensor([1.0, 2.0, 5.0]), 4000
    draws = torch.stack([power_rows(weights, 2, generator=generator) for _ in range(count)])
    share = 5 / 8 * 2 / 3
    hits = float(((draws[:, 0] == 2) & (draws[:, 1] == 1)).float().mean())
    assert abs(hits - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_power_bald_draws_without_replacement(pool):
    assert sorted(power_bald(pool, 7, power=2.0).tolist()) == list(range(7))


def test_top_rows_are_sorted_by_score():
    assert top_rows(torch.tensor([0.3, 0.9, 0.1, 0.5]), 3).tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    "choose",
    [
        bald,
        predictive_entropy,
        variance_score,
        lambda empty: batch_bald(empty, 1),
        lambda empty: power_bald(empty, 1),
        lambda empty: top_rows(empty[0, :, 0], 1),
    ],
)
def test_an_empty_pool_is_refused(choose):
    with pytest.raises(DataError, match=r"pool is empty: there are no rows left to label\. Stop, or add"):
        choose(torch.zeros(4, 0, 3))


@pytest.mark.parametrize("choose", [bald, predictive_entropy, lambda one: batch_bald(one, 1)])
def test_one_class_is_refused(choose):
    with pytest.raises(DataError, match="one class, so labels carry no information"):
        choose(torch.ones(4, 5, 1))


def test_batches_larger_than_the_pool_are_refused(pool):
    for choose in (lambda: batch_bald(pool, 8), lambda: top_rows(bald(pool), 8), lambda: power_bald(pool, 0)):
        with pytest.raises(HyperparameterError, match=r"Cannot choose size=\d rows from a pool of 7\. Choose 1 to 7"):
            choose()


def test_invalid_arguments_are_refused(pool):
    with pytest.raises(HyperparameterError, match="power=-1"):
        power_bald(pool, 1, power=-1)
    with pytest.raises(ShapeError, match=r"expected \[samples, rows, classes\]"):
        bald(pool[0])
    with pytest.raises(HyperparameterError, match=r"12 rows of 3 classes have 3\^12"):
        joint_information(pool[:, [0] * 12])
