"""What a fit says of itself: one line at the first update and one at the end."""

from __future__ import annotations

import logging
import math
import re

import pytest
from tiny_training import EXAMPLES, Classifier, fit

from lightning_bayes import NoisyKFACCallback, OGNCallback, VOGNCallback
from lightning_bayes.callbacks import summary

WEIGHTS = 4 * 6 + 6 + 6 * 3 + 3


def lines(callback, caplog):
    with caplog.at_level(logging.INFO):
        fit(Classifier(), callback, max_epochs=2)
    name = type(callback).__name__
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"{name}: ")]


def test_the_default_says_what_it_does_and_what_it_found(caplog):
    callback = VOGNCallback()
    start, end = lines(callback, caplog)
    parts = (
        f"VOGNCallback: AdamW moves the mean; {WEIGHTS} weights have noise, 0 are points",
        f"N = {EXAMPLES}",
        "no prior is stated, so the mean is unregularised",
        "the curvature places noise of κ = 0.05 times each tensor's size",
        "predictions are the mean of 10 weight samples (softmax)",
    )
    assert start == "; ".join(parts) + "."
    determined = float(callback.optimizer.effective_parameters())
    assert end.startswith(f"VOGNCallback: the data determine about {determined:.0f} of {WEIGHTS} parameters")


def test_noise_whose_temperature_underflows_ends_in_a_line(caplog):
    _, end = lines(VOGNCallback(relative_noise=1e-200), caplog)
    assert "log τ of the tensors is -inf to -inf" in end


def test_a_regression_hears_which_posterior_widens_away_from_the_data(caplog):
    """docs/regression.md has the widths of both in a gap of the data."""
    start, _ = lines(VOGNCallback(link="identity"), caplog)
    assert start.endswith("that of LaplaceCallback('full', 'all') in the place of this callback does.")
    caplog.clear()
    natural, _ = lines(VOGNCallback(link="identity", lr=0.01), caplog)
    assert "LaplaceCallback" not in natural


@pytest.mark.parametrize("callback", [VOGNCallback(), NoisyKFACCallback()], ids=lambda c: type(c).__name__)
def test_the_temperatures_are_those_of_the_posterior(callback, caplog):
    """δ_t = Ñ γ_t / τ_t, and without a stated prior Σ_i (1 - δ_t Σ_i) parameters are determined."""
    (_, end) = lines(callback, caplog)
    found = summary.temperatures(callback.optimizer)
    low, high = map(float, re.search(r"is (\S+) to (\S+) \(0:", end).groups())
    assert low == pytest.approx(min(math.log(tau) for tau in found.values()), abs=0.06)
    assert high == pytest.approx(max(math.log(tau) for tau in found.values()), abs=0.06)
    assert all(0 < tau < 1 for tau in found.values())


def test_an_explicit_learning_rate_and_prior_are_named(caplog):
    start, end = lines(VOGNCallback(lr=0.01, prior_precision=2.0, eval_samples=0), caplog)
    assert "the natural step moves the mean" in start
    assert (
        "the prior's precision is 2; the noise is that of the variational bound; predictions are the posterior mean"
        in start
    )
    assert "log τ of the tensors is 0.0 to 0.0" in end


def test_without_noise_there_is_no_end(caplog):
    (start,) = lines(OGNCallback(), caplog)
    assert start.endswith(f"0 weights have noise, {WEIGHTS} are points; N = {EXAMPLES}.")
