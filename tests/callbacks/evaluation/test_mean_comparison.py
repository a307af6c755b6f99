"""A test says what averaging over samples changes: the scores of both predictions, and errors of their differences."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F
from posterior_around import outputs_of_samples
from tiny_training import CLASSES, Classifier, loader, mlp, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import MCDropoutCallback, VOGNCallback
from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison
from lightning_bayes.metrics.paired import Paired
from lightning_bayes.zoo import BayesClassifier, BayesRegressor

S = 5
WIDE = {"eval_samples": S, "relative_noise": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


class LossInTest(Classifier):
    """A user's module, whose test step logs its loss and returns nothing."""

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(self(batch[0]), batch[1]))


def results_of(module, callback, data, caplog, **options):
    """Metrics and printed lines of a test after a fit, and the posterior's samples."""
    trainer = quiet_trainer(callback, max_epochs=2, **options)
    trainer.fit(module, data)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        rows = trainer.test(module, data, verbose=False)
    text = "\n".join(record.getMessage() for record in caplog.records)
    return {key: value for row in rows for key, value in row.items()}, text


@torch.no_grad()
def by_hand(module, callback, inputs):
    """Outputs under each sample, and at the mean."""
    each = outputs_of_samples(module, callback.optimizer.posterior(), inputs, S, callback.seed)
    return torch.stack(each), module(inputs)


def assert_paired(found, key, first, second):
    """The logged difference and error are those of two lists of one value per example."""
    difference = (first - second).double()
    assert found[f"test_diff/{key}"] == pytest.approx(difference.mean().item(), rel=1e-3, abs=1e-7)
    error = difference.std(correction=0).item() / math.sqrt(len(difference))
    assert found[f"test_diff/{key}_SE"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("build", [LossInTest, lambda: BayesClassifier(mlp(), CLASSES)], ids=["own", "zoo"])
def test_differences_of_a_classifier_are_those_of_both_predictions(build, caplog):
    module, callback = build(), VOGNCallback(**WIDE)
    found, text = results_of(module, callback, loader(), caplog)
    inputs, targets = loader().dataset.tensors
    samples, mean = by_hand(module, callback, inputs)
    average = samples.softmax(-1).mean(0)
    nlls = [F.nll_loss(probs.log(), targets, reduction="none") for probs in (average, mean.softmax(-1))]
    assert_paired(found, "cls/NLL", *nlls)
    hits = [(probs.argmax(-1) == targets).double() for probs in (average, mean)]
    assert found["test_diff/cls/Acc"] == pytest.approx((hits[0] - hits[1]).mean().item())
    first, second, difference = (nlls[0].mean(), nlls[1].mean(), (nlls[0] - nlls[1]).mean())
    assert f"NLL       {first:.4f} instead of {second:.4f}, {difference:+.4f} ±" in text
    assert "VOGNCallback: the average over 5 samples instead of the mean, on 48 test examples" in text
    assert [re.search(rf"\n  {word} ", text) is not None for word in ("accuracy", "NLL", "ECE")] == [True] * 3


def test_metrics_of_the_zoo_agree_with_the_comparison(caplog):
    found, _ = results_of(BayesClassifier(mlp(), CLASSES), VOGNCallback(**WIDE), loader(), caplog)
    for key in ("cls/Acc", "cls/NLL", "cal/ECE"):
        assert found[f"test_diff/{key}"] == pytest.approx(found[f"test/{key}"] - found[f"test_mean/{key}"], abs=1e-6)


def test_labels_of_a_multilabel_example_are_scored_together(caplog):
    inputs = loader().dataset.tensors[0]
    labels = (inputs[:, :2] > 0).float()
    module = LossInTest(net=nn.Linear(4, 2), loss=F.binary_cross_entropy_with_logits)
    callback = VOGNCallback(**WIDE)
    found, _ = results_of(module, callback, DataLoader(TensorDataset(inputs, labels), batch_size=8), caplog)
    samples, mean = by_hand(module, callback, inputs)
    both = samples.sigmoid().mean(0), mean.sigmoid()
    assert_paired(found, "cls/NLL", *(F.binary_cross_entropy(p, labels, reduction="none").mean(1) for p in both))


def test_differences_of_a_regression_have_the_units_of_the_data(caplog):
    inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    module, callback = BayesRegressor(nn.Linear(3, 1), noise_std=0.3), VOGNCallback(**WIDE)
    module.target_std.fill_(10.0)
    found, text = results_of(module, callback, data, caplog)
    samples, mean = by_hand(module, callback, inputs)
    noise = torch.distributions.Normal(inputs.sum(1, keepdim=True), 0.3)
    at_samples = -(noise.log_prob(samples).logsumexp(0) - math.log(S))
    assert_paired(found, "reg/NLL", at_samples.flatten(), -noise.log_prob(mean).flatten())
    assert f"RMSE      {found['test/reg/RMSE']:.4f} instead of" in text


def test_a_posterior_that_changes_nothing_is_called_so(caplog):
    _, text = results_of(LossInTest(), VOGNCallback(eval_samples=S, relative_noise=1e-6), loader(), caplog)
    assert text.count("+0.0000 ± 0.0000") + text.count("-0.0000 ± 0.0000") == 3
    assert "No score differs by two standard errors and 0.0001." in text


def test_dropout_is_compared_with_the_network_without_dropout(caplog):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, CLASSES))
    found, _ = results_of(LossInTest(net=net), MCDropoutCallback(S), loader(), caplog)
    assert found["test_diff/cls/NLL_SE"] > 0


class TwoCalls(LossInTest):
    def test_step(self, batch, batch_idx):
        self.log("loss", F.cross_entropy(self(batch[0]) + self(batch[0]), batch[1]))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), F.one_hot(batch[1], CLASSES).float())


@pytest.mark.parametrize(
    ("module", "callback"),
    [(TwoCalls, VOGNCallback(**WIDE)), (LossInTest, VOGNCallback(eval_samples=0))],
    ids=["two calls", "no samples"],
)
def test_nothing_is_said_without_a_comparison(module, callback, caplog):
    found, text = results_of(module(), callback, loader(), caplog)
    assert not any(key.startswith("test_diff") for key in found)
    assert "instead of" not in text


def test_the_comparison_costs_one_forward_pass_per_batch(caplog):
    calls = []
    module = LossInTest()
    module.net.register_forward_hook(lambda *_: calls.append(1))
    callback = VOGNCallback(**WIDE)
    trainer = quiet_trainer(callback, max_epochs=1)
    trainer.fit(module, loader())
    calls.clear()
    trainer.test(module, loader(), verbose=False)
    assert len(calls) == (S + 1) * len(loader())


def test_a_difference_that_no_digit_shows_is_no_verdict():
    """A closed form has one prediction, no samples."""
    scores = {"cls/NLL": Paired(0.81, 0.83, 0.005), "cal/ECE": Paired(0.06, 0.06002, 1e-6)}
    text = Comparison(scores, 300, 0.5).report("LaplaceCallback", 1)
    assert text.startswith("LaplaceCallback: its prediction instead of the mean, on 300 test examples")
    assert text.endswith("It is better in NLL, by more than two standard errors.")
    scores["cls/Acc"] = Paired(0.7, 0.75, 0.01)
    worse = Comparison(scores, 300, 0.5).report("LaplaceCallback", 1)
    assert worse.endswith("It is better in NLL, and worse in accuracy, by more than two standard errors.")
    del scores["cls/Acc"]
    del scores["cls/NLL"]
    text = Comparison(scores, 300, 0.5).report("SWAGCallback", 30)
    assert text.endswith("No score differs by two standard errors and 0.0001.")
