"""The lines that a fit prints, at the first update and at the end."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from tiny_training import EXAMPLES, FEATURES, Classifier, ValidatedClassifier, adamw, fit, loader, quiet_trainer
from torch import nn

from lightning_bayes import DeepEnsembleCallback, LaplaceCallback, OGNCallback, SWAGCallback, VOGNCallback, mc_predict

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
        "Predictions average 10 weight samples (categorical likelihood)",
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


class TwoValues(Regressor):
    """Two outputs with an error each."""

    def forward(self, x):
        return self.net(x), self.net(-x)

    def training_step(self, batch, batch_idx):
        return sum(F.mse_loss(values, batch[0][:, :3]) for values in self(batch[0]))


def with_loss(net, loss):
    """A regression on the first feature."""

    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return loss(self(batch[0]), batch[0][:, :1])

    return lambda: Own(net=net())


def predicted_noise(outputs, targets):
    return F.gaussian_nll_loss(outputs[:, :1], targets, F.softplus(outputs[:, 1:]))


WIDE = partial(nn.Sequential, nn.Linear(FEATURES, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))
REGRESSIONS = {
    "one value": Regressor,
    "more weights than a full matrix takes": with_loss(WIDE, F.mse_loss),
    "a variance of its own": with_loss(lambda: nn.Linear(FEATURES, 2), predicted_noise),
    "BatchNorm": with_loss(
        lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), F.mse_loss
    ),
    "two values": TwoValues,
    "an absolute error": with_loss(lambda: nn.Linear(FEATURES, 1), F.l1_loss),
    "Huber's loss": with_loss(lambda: nn.Linear(FEATURES, 1), F.huber_loss),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_callback_that_a_regression_is_sent_to_takes_it(name, caplog):
    """docs/defaults.md has the widths of both posteriors in a gap of the data."""
    start, _ = lines(VOGNCallback(), caplog, REGRESSIONS[name])
    (advice,) = re.findall(r"away from the data; to get one that does, replace this callback by (.*)\.$", start)
    fit(
        REGRESSIONS[name](),
        eval(advice, {"LaplaceCallback": LaplaceCallback, "DeepEnsembleCallback": DeepEnsembleCallback}),
    )


def test_the_papers_step_is_sent_nowhere(caplog):
    natural, _ = lines(VOGNCallback(lr=0.01), caplog, Regressor)
    assert "replace this callback" not in natural


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (adamw, "No prior is set, so the mean is unregularised."),
        (
            lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
            "No prior is set: the decoupled weight decay of AdamW acts on the mean.",
        ),
        (lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.125), "The prior precision is 6."),
    ],
    ids=["no decay", "decoupled decay", "a penalty"],
)
def test_the_line_says_what_regularises_the_mean(configure, said, caplog):
    start, _ = lines(VOGNCallback(), caplog, lambda: Classifier(configure))
    assert said in start


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


@pytest.mark.parametrize(
    "make",
    [LaplaceCallback, partial(SWAGCallback, lr=0.05), VOGNCallback, partial(DeepEnsembleCallback, 2)],
    ids=["Laplace", "SWAG", "VOGN", "an ensemble"],
)
@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge")
def test_every_fit_ends_with_the_same_comparison(make, caplog):
    with caplog.at_level(logging.INFO):
        quiet_trainer(make(), max_epochs=30).fit(ValidatedClassifier(), loader(), loader())
    line = (
        r"Callback: the average over \d+ samples instead of the (mean|network alone)(, each with a temperature of its own "
        rf"from the same rows)?, on {EXAMPLES} validation examples .*: accuracy .* ± .*, NLL .* ± .*, ECE .* ± .*; mutual"
    )
    assert sum(bool(re.search(line, message)) for message in caplog.messages) == 1
