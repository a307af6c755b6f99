"""The lines that a fit prints, at the first update and at the end."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from tiny_training import EXAMPLES, Classifier, ValidatedClassifier, fit, loader, quiet_trainer

from lightning_bayes import OGNCallback, VOGNCallback, mc_predict

WEIGHTS = 4 * 6 + 6 + 6 * 3 + 3


class Regressor(Classifier):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), F.one_hot(batch[1], 3).float())


def lines(callback, caplog, module=Classifier):
    with caplog.at_level(logging.INFO):
        fit(module(), callback, max_epochs=2)
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
    posterior = callback.optimizer.posterior()
    weights = torch.cat([mean.flatten() for mean in posterior.mean.values()])
    noise = torch.cat([variance.flatten() for variance in posterior.variance().values()])
    size = float((noise.mean() / weights.square().mean()).sqrt())
    assert end.startswith(f"VOGNCallback: the RMS noise is {size:.1g} times the RMS weight.")


def test_noise_whose_temperature_underflows_is_summarised(caplog):
    _, end = lines(VOGNCallback(relative_noise=1e-200), caplog)
    assert "the RMS noise is 0 times" in end


def test_a_regression_names_the_callback_whose_band_widens_away_from_the_data(caplog):
    """docs/defaults.md has the widths of both posteriors in a gap of the data."""
    start, _ = lines(VOGNCallback(), caplog, Regressor)
    assert start.endswith("to get one that does, replace this callback by LaplaceCallback('full', 'all').")
    caplog.clear()
    natural, _ = lines(VOGNCallback(lr=0.01), caplog, Regressor)
    assert "LaplaceCallback" not in natural


def test_the_end_shows_what_the_samples_change_on_the_validation_set(caplog):
    """The values are those of an evaluation of the same posterior afterwards."""
    callback = VOGNCallback(val_samples=5, eval_samples=5, relative_noise=0.5, calibrate=False)
    module = ValidatedClassifier()
    with caplog.at_level(logging.INFO):
        quiet_trainer(callback, max_epochs=2).fit(module, loader(), loader())
    end = [record.getMessage() for record in caplog.records][-1]
    inputs, targets = loader().dataset.tensors
    prediction = mc_predict(module, callback.optimizer.posterior(), inputs, samples=5)
    found = {name: float(value) for name, value in re.findall(r"(information|NLL) (\d\.\d+)", end)}
    assert end.startswith(
        f"VOGNCallback: the average over 5 samples instead of the mean, on {EXAMPLES} validation examples"
    )
    assert found["information"] == pytest.approx(prediction.mutual_information.mean().item(), rel=0.1)
    assert found["NLL"] == pytest.approx(F.nll_loss(prediction.probs.log(), targets).item(), abs=1e-3)
    losses = F.nll_loss(prediction.probs.log(), targets, reduction="none") - F.cross_entropy(
        module(inputs), targets, reduction="none"
    )
    change, error = losses.mean().item(), losses.std(correction=0).item() / EXAMPLES**0.5
    ((printed, printed_error),) = re.findall(r"NLL \d\.\d+ \((.\d\.\d+) ± (\d\.\d+)\)", end)
    assert (float(printed), float(printed_error)) == pytest.approx((change, error), abs=1e-3)


@pytest.mark.parametrize("ends", ["early", "between validations"])
def test_the_end_shows_the_last_validation_wherever_it_was(ends, caplog):
    stops, options = [], {"max_epochs": 5, "check_val_every_n_epoch": 2}
    if ends == "early":
        stops, options = [EarlyStopping("val_loss", min_delta=9.0, patience=1)], {"max_epochs": 9}
    with caplog.at_level(logging.INFO):
        trainer = quiet_trainer(VOGNCallback(), *stops, **options)
        trainer.fit(ValidatedClassifier(), loader(), loader())
    assert trainer.current_epoch == (2 if stops else 5)
    assert re.match(
        r"VOGNCallback: the average over \d+ samples instead of the mean.* validation examples", caplog.messages[-1]
    )


def test_samples_that_hardly_differ_are_called_so(caplog):
    with caplog.at_level(logging.INFO):
        callback = VOGNCallback(relative_noise=1e-4)
        quiet_trainer(callback, max_epochs=1).fit(ValidatedClassifier(), loader(), loader())
    assert (
        "The samples hardly differ from each other. For networks that differ, use DeepEnsembleCallback(5)."
        in caplog.text
    )


def test_an_explicit_learning_rate_and_prior_are_named(caplog):
    start, _ = lines(VOGNCallback(lr=0.01, prior_precision=2.0, eval_samples=0), caplog)
    assert "the natural-gradient step updates the mean" in start
    assert (
        "The prior precision is 2. The noise follows from the variational bound. Predictions use the posterior mean"
        in start
    )


def test_without_noise_there_is_no_line_at_the_end(caplog):
    (start,) = lines(OGNCallback(), caplog)
    assert start.endswith(f"0 of {WEIGHTS} parameters have a posterior. N = {EXAMPLES} training examples.")
