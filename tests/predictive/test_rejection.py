"""The risk over many calibration sets against the guarantee, and thresholds against an explicit search."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binomtest

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.predictive import Rejector, fewest_rows


def calibrated(generator, count):
    """Calibrated predictions of two classes, so the risk above t is (1 - t)/2."""
    sure = 0.5 + 0.5 * torch.rand(count, generator=generator, dtype=torch.float64)
    labels = (torch.rand(count, generator=generator) > sure).long()
    return torch.stack([sure, 1 - sure], 1), labels


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
def test_the_risk_is_at_most_the_tolerated_one_with_the_stated_confidence(confidence, generator):
    """True risk of the answers, in closed form, over 200 calibration sets; violations are at most δ within 4 errors."""
    draws, broken, coverages = 200, 0, []
    for _ in range(draws):
        try:
            found = Rejector.fit(*calibrated(generator, 1500), risk=0.1, confidence=confidence)
        except DataError:  # answers nothing, which breaks no promise
            coverages.append(0.0)
            continue
        broken += (1 - max(found.threshold, 0.5)) / 2 > 0.1
        coverages.append(found.coverage)
    delta = 1 - confidence
    assert broken / draws < delta + 4 * math.sqrt(delta * confidence / draws)
    best = 0.4  # t = 0.8
    assert 0.5 * best < sum(coverages) / draws < best


def test_all_inputs_are_answered_if_no_prediction_is_wrong():
    probs = torch.eye(3).repeat(100, 1) * 0.9 + 0.03
    found = Rejector.fit(probs, torch.arange(3).repeat(100), risk=0.05)
    assert (found.coverage, found.error, found.threshold) == (1.0, 0.0, 0.0)
    assert found.accepts(probs).all()


def test_the_chosen_threshold_passes_scipys_binomial_test(generator):
    probs, labels = calibrated(generator, 1000)
    found = Rejector.fit(probs, labels, risk=0.1)
    accepted = found.accepts(probs)
    errors, answered = int((labels[accepted] == 1).sum()), int(accepted.sum())
    assert (answered / 1000, errors / answered) == pytest.approx((found.coverage, found.error))
    assert binomtest(errors, answered, 0.1, "less").pvalue <= 0.05 / 4  # four sequences of tests share δ


def coverage_by_hand(probs, labels, risk, delta):
    """The largest fraction of rows that one of four sequences of binomial tests answers, each at the level δ / 4."""
    wrong = (probs.argmax(1) != labels)[probs.amax(1).argsort(descending=True)]
    rows, covered = len(labels), 0
    fewest = math.ceil(math.log(delta / 4) / math.log1p(-risk))
    for start in (rows, rows // 2, rows // 4, rows // 8):
        for answered in range(max(fewest, start), rows + 1):
            if binomtest(int(wrong[:answered].sum()), answered, risk, "less").pvalue > delta / 4:
                break
            covered = max(covered, answered)
    return covered / rows


@pytest.mark.parametrize(("risk", "confidence"), [(0.1, 0.95), (0.12, 0.8), (0.2, 0.9)])
def test_the_coverage_is_that_of_four_sequences_of_tests_that_share_the_error(risk, confidence, generator):
    for _ in range(5):
        probs, labels = calibrated(generator, 400)
        expected = coverage_by_hand(probs, labels, risk, 1 - confidence)
        if not expected:
            with pytest.raises(DataError, match="No threshold guarantees"):
                Rejector.fit(probs, labels, risk, confidence)
            continue
        assert Rejector.fit(probs, labels, risk, confidence).coverage == expected


def test_inputs_of_equal_confidence_are_all_answered_or_all_rejected(generator):
    probs, labels = calibrated(generator, 2000)
    coarse = (probs * 10).round() / 10
    found = Rejector.fit(coarse, labels, risk=0.12)
    accepted = found.accepts(coarse)
    assert not set(coarse[accepted, 0].tolist()) & set(coarse[~accepted, 0].tolist())
    assert int(accepted.sum()) == round(found.coverage * 2000)


def test_the_fewest_rows_just_pass():
    for risk, confidence in ((0.01, 0.95), (0.1, 0.9)):
        rows = fewest_rows(risk, confidence)
        probs = torch.tensor([[0.9, 0.1]]).repeat(rows, 1)
        assert Rejector.fit(probs, torch.zeros(rows).long(), risk, confidence).coverage == 1
        with pytest.raises(DataError, match=f"at least {rows} rows are needed. Pass more rows"):
            Rejector.fit(probs[1:], torch.zeros(rows - 1).long(), risk, confidence)


def test_a_prediction_is_accepted_like_its_probabilities(generator):
    probs, labels = calibrated(generator, 500)
    found = Rejector.fit(probs, labels, risk=0.2)
    prediction = Categorical().summarise(probs.log()[None])
    assert torch.equal(found.accepts(prediction), found.accepts(probs))
    assert Rejector(**found.state_dict()) == found


def test_invalid_input_is_refused(generator):
    probs, labels = calibrated(generator, 100)
    with pytest.raises(DataError, match=r"No threshold guarantees a risk of 0\.001 .* 25\.0% are wrong"):
        Rejector.fit(probs, torch.tensor([0, 0, 0, 1]).repeat(25), risk=0.001)
    with pytest.raises(HyperparameterError, match=r"risk=5 .* a risk of 5 % is 0\.05"):
        Rejector.fit(probs, labels, risk=5)
    with pytest.raises(ShapeError, match=r"expected \[rows, classes\]"):
        Rejector.fit(probs, labels[:3], risk=0.1)
    with pytest.raises(DataError, match="one class"):
        Rejector.fit(torch.ones(100, 1), labels, risk=0.1)
