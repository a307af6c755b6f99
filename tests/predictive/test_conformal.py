"""Coverage over many calibration sets against its exact distribution; scores against their definitions in a loop."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.predictive import (
    ConformalIntervals,
    ConformalSets,
    aps_scores,
    conformal_quantile,
    raps_scores,
    thr_scores,
)

CALIBRATION, TEST, DRAWS = 150, 400, 150


def within_error(hits, coverage):
    """The mean coverage over calibration sets is ⌈(n + 1) c⌉/(n + 1), with the variance of a beta-binomial."""
    rank = math.ceil((CALIBRATION + 1) * coverage)
    mean = rank / (CALIBRATION + 1)
    spread = mean * (1 - mean) * (1 / (CALIBRATION + 2) + 1 / TEST)  # at least the variance of one draw
    return abs(float(hits.mean()) - mean) < 4 * math.sqrt(spread / DRAWS)


def overconfident(generator, count):
    """Labels drawn from a softmax, and predictions whose logits are three times too large."""
    logits = torch.randn(count, 6, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return (3 * logits).softmax(1), labels


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("score", ["thr", "aps", "raps"])
def test_sets_have_the_requested_coverage(score, coverage, generator):
    hits = torch.empty(DRAWS)
    for draw in range(DRAWS):
        fitted = ConformalSets.fit(*overconfident(generator, CALIBRATION), coverage, score=score, generator=generator)
        probs, labels = overconfident(generator, TEST)
        hits[draw] = fitted.sets(probs, generator).gather(1, labels[:, None]).float().mean()
    assert within_error(hits, coverage)


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("width", [0.3, 3.0])
def test_intervals_have_the_requested_coverage(coverage, width, generator):
    """Intervals that are much too narrow or too wide, for heteroscedastic noise."""

    def rows(count):
        x = torch.rand(count, generator=generator)
        return x - width * x, x + width * x, x + x * torch.randn(count, generator=generator)

    hits = torch.empty(DRAWS)
    for draw in range(DRAWS):
        fitted = ConformalIntervals.fit(*rows(CALIBRATION), coverage)
        lower, upper, truth = rows(TEST)
        ends = fitted.intervals(lower, upper)
        assert (ends.upper >= ends.lower).all()
        hits[draw] = ((ends.lower <= truth) & (truth <= ends.upper)).float().mean()
    assert within_error(hits, coverage)


def test_uncalibrated_sets_undercover(generator):
    """Control: the same overconfident predictions cover too little without calibration."""
    probs, labels = overconfident(generator, 4000)
    inside = aps_scores(probs, torch.rand(4000, generator=generator)) <= 0.9
    assert inside.gather(1, labels[:, None]).float().mean() < 0.8


def test_scores_match_their_definitions(generator):
    probs, u = torch.rand(20, 5, generator=generator).softmax(1), torch.rand(20, generator=generator)
    thr, aps, raps = thr_scores(probs), aps_scores(probs, u), raps_scores(probs, u, penalty=0.1, free=2)
    for row in range(20):
        for label in range(5):
            p = probs[row]
            more = sum(float(q) for q in p if q > p[label])
            rank = 1 + sum(bool(q > p[label]) for q in p)
            assert thr[row, label].item() == pytest.approx(1 - float(p[label]), abs=1e-6)
            expected = more + float(u[row] * p[label])
            assert aps[row, label].item() == pytest.approx(expected, abs=1e-6)
            assert raps[row, label].item() == pytest.approx(expected + 0.1 * max(0, rank - 2), abs=1e-6)


def test_the_quantile_is_an_order_statistic():
    scores = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0])
    assert conformal_quantile(scores, 0.5) == 3.0  # ⌈6 · 0.5⌉ = 3rd
    assert conformal_quantile(scores, 0.8) == 9.0
    assert conformal_quantile(scores, 0.9) == math.inf  # five rows cannot promise 90 %


def test_an_infinite_quantile_gives_sets_of_all_classes(generator):
    probs, labels = overconfident(generator, 5)
    assert ConformalSets.fit(probs, labels, 0.95, score="thr").sets(probs).all()


def test_invalid_input_is_refused(generator):
    probs, labels = overconfident(generator, 10)
    with pytest.raises(HyperparameterError, match="'thr', 'aps' or 'raps'"):
        ConformalSets.fit(probs, labels, score="margin")
    with pytest.raises(HyperparameterError, match=r"coverage=90 must lie between 0 and 1; 90 % is 0\.9"):
        ConformalSets.fit(probs, labels, 90)
    with pytest.raises(DataError, match="no calibration rows"):
        conformal_quantile(torch.zeros(0), 0.9)
    with pytest.raises(DataError, match="one class"):
        ConformalSets.fit(torch.ones(10, 1), labels * 0)
    with pytest.raises(ShapeError, match=r"expected \[rows, classes\]"):
        ConformalSets.fit(probs, labels[:5])
    with pytest.raises(ShapeError, match=r"expected \[rows\] each"):
        ConformalIntervals.fit(probs, probs, labels)
