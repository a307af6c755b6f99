"""The lines that a fit prints, at the first update and at the end."""

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


def test_the_default_fit_prints_its_settings_and_its_posterior(caplog):
    callback = VOGNCallback()
    start, end = lines(callback, caplog)
    parts = (
        "VOGNCallback: AdamW updates the mean",
        f"{WEIGHTS} of {WEIGHTS} parameters have a posterior",
        f"N = {EXAMPLES} training examples",
        "No prior is set, so the mean is unregularised",
        "The noise scale is κ = 0.07 times each tensor's size, shaped by the curvature",
        "Predictions average 10 weight samples (softmax link)",
    )
    assert start == ". ".join(parts) + "."
    determined = float(callback.optimizer.effective_parameters())
    assert end.startswith(f"VOGNCallback: the data determine about {determined:.0f} of {WEIGHTS} parameters")


def test_noise_whose_temperature_underflows_is_summarised(caplog):
    _, end = lines(VOGNCallback(relative_noise=1e-200), caplog)
    assert "log τ = -inf (0: the Bayesian posterior" in end


def test_a_regression_names_the_callback_whose_band_widens_away_from_the_data(caplog):
    """docs/defaults.md has the widths of both posteriors in a gap of the data."""
    start, _ = lines(VOGNCallback(link="identity"), caplog)
    assert start.endswith("to get one that does, replace this callback by LaplaceCallback('full', 'all').")
    caplog.clear()
    natural, _ = lines(VOGNCallback(link="identity", lr=0.01), caplog)
    assert "LaplaceCallback" not in natural


@pytest.mark.parametrize("callback", [VOGNCallback(), NoisyKFACCallback()], ids=lambda c: type(c).__name__)
def test_the_temperatures_are_those_of_the_posterior(callback, caplog):
    """δ_t = Ñ γ_t / τ_t, and without an explicit prior Σ_i (1 - δ_t Σ_i) parameters are determined."""
    (_, end) = lines(callback, caplog)
    found = summary.temperatures(callback.optimizer)
    low, high = map(float, re.search(r"= (\S+) to (\S+) across tensors \(0:", end).groups())
    assert low == pytest.approx(min(math.log(tau) for tau in found.values()), abs=0.06)
    assert high == pytest.approx(max(math.log(tau) for tau in found.values()), abs=0.06)
    assert all(0 < tau < 1 for tau in found.values())


def test_an_explicit_learning_rate_and_prior_are_named(caplog):
    start, end = lines(VOGNCallback(lr=0.01, prior_precision=2.0, eval_samples=0), caplog)
    assert "the natural-gradient step updates the mean" in start
    assert (
        "The prior precision is 2. The noise follows from the variational bound. Predictions use the posterior mean"
        in start
    )
    assert "log τ = 0.0 (0: the Bayesian posterior" in end


def test_without_noise_there_is_no_line_at_the_end(caplog):
    (start,) = lines(OGNCallback(), caplog)
    assert start.endswith(f"0 of {WEIGHTS} parameters have a posterior. N = {EXAMPLES} training examples.")
