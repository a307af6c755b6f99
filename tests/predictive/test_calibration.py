"""Width and temperature on validation data: against searches by hand and models whose posterior is known."""

from __future__ import annotations

import math

import pytest
import torch
from of_classes import MonteCarloNetwork, calibrate, mc_predict
from random_matrices import F64
from torch import nn

from lightning_bayes import MeanField
from lightning_bayes.errors import DataError, NonFiniteError
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.posteriors import ScaledPosterior
from lightning_bayes.predictive import (
    PosteriorSamples,
    choose_calibration,
    fit_temperature,
    predictive_nll,
)

CLASSES, ROWS = 4, 400


def labels_of(logits, generator):
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def linear_posterior(generator, precision=25.0):
    mean = {"weight": 2 * torch.randn(CLASSES, 6, generator=generator)}
    return MeanField(mean, {"weight": torch.full((CLASSES, 6), precision)}, {"weight": 1.0}, num_data=50)


def test_the_temperature_minimises_the_nll_and_the_shrinkage(generator):
    """The derivative with respect to log T vanishes, and with it that of a Gaussian prior with standard deviation 0.2."""
    logits = 1.5 * torch.randn(3, 50, CLASSES, generator=generator)
    targets = labels_of(logits[0], generator)
    found = choose_calibration(lambda scale: logits, targets, "softmax", width=False)
    log = torch.tensor(math.log(found.temperature), dtype=F64, requires_grad=True)
    log_probs = (logits.double() / log.exp()).softmax(-1).mean(0).log()
    (nn.functional.nll_loss(log_probs, targets, reduction="sum") + log**2 / (2 * 0.2**2)).backward()
    assert (
        abs(log.grad.item()) < 0.05
    )  # in nats; the search ends within 1e-3 of log T, whose second derivative is over 25
    assert found.temperature == pytest.approx(fit_temperature(logits, targets, shrinkage=0.2), rel=2e-3)


def test_the_standard_error_is_that_of_the_paired_differences(generator):
    logits = 3 * torch.randn(ROWS, CLASSES, generator=generator, dtype=F64)
    targets = labels_of(logits / 3, generator)
    found = choose_calibration(lambda scale: logits[None], targets, "softmax")
    before, after = (nn.functional.cross_entropy(logits / t, targets, reduction="none") for t in (1, found.temperature))
    assert found.standard_error == pytest.approx(float((after - before).std()) / math.sqrt(ROWS), rel=0.01)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_logits_of_another_scale_are_divided_by_it(factor, generator):
    logits = torch.randn(ROWS * 10, CLASSES, generator=generator)
    targets = labels_of(logits, generator)
    found = choose_calibration(lambda scale: factor * logits[None], targets, "softmax")
    assert found.scale == 1
    assert found.temperature == pytest.approx(factor, rel=0.1)
    assert found.nll == pytest.approx(predictive_nll(factor * logits[None] / found.temperature, targets, "softmax"))
    assert found.nll_before - found.nll > found.standard_error


def test_few_examples_change_little_and_never_raise_the_nll():
    """Without an effect, log T is a shrunk maximum of the likelihood: 1/σ² + I is its precision, with I the information."""
    logs = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, 20, CLASSES, generator=generator)
        found = choose_calibration(lambda scale, logits=logits: logits, labels_of(logits[0], generator), "softmax")
        assert found.nll <= found.nll_before
        logs.append(math.log(found.temperature))
    probs = torch.randn(100_000, CLASSES, generator=torch.Generator().manual_seed(0), dtype=F64)
    weights = probs.softmax(-1)
    information = 20 * float((weights * probs**2).sum(-1).sub((weights * probs).sum(-1) ** 2).mean())
    expected = math.sqrt(information) / (1 / 0.2**2 + information)
    spread = torch.tensor(logs).square().mean().sqrt().item()
    assert spread == pytest.approx(expected, rel=4 / math.sqrt(200))


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_right_predictions_do_not_ask_for_infinite_confidence(link):
    """The best T of n right examples, by its stationarity: n (1 - p) margin / T = log(1/T) / σ²."""
    rows, margin = 150, 4.0
    outputs = torch.tensor([[[margin, 0.0]]] if link == "softmax" else [[[margin]]]).expand(1, rows, -1)
    targets = torch.zeros(rows).long() if link == "softmax" else torch.ones(rows)
    inverse = 1 / choose_calibration(lambda scale: outputs, targets, link).temperature
    wrong = 1 / (1 + math.exp(margin * inverse))
    assert rows * wrong * margin * inverse == pytest.approx(math.log(inverse) / 0.2**2, rel=0.02)


def test_six_right_examples_hardly_change_a_prediction():
    found = choose_calibration(lambda scale: 10 * torch.eye(6)[None], torch.arange(6), "softmax")
    assert found.temperature == pytest.approx(1, abs=0.01)
    assert found.nll <= found.nll_before


def test_binary_logits_are_divided_too(generator):
    logits = torch.randn(ROWS * 10, 1, generator=generator)
    targets = torch.bernoulli(logits.sigmoid(), generator=generator)[:, 0]
    assert choose_calibration(lambda scale: 3 * logits[None], targets, "sigmoid").temperature == pytest.approx(
        3, rel=0.1
    )


@pytest.mark.parametrize("factor", [0.125, 4.0])
def test_the_width_of_a_posterior_of_the_wrong_width_is_found(factor, generator):
    """Weights from the true posterior made the targets, so a posterior that is `factor` times too wide needs 1 / factor."""
    x, noise, std = torch.randn(2000, 30, generator=generator, dtype=F64), 1.0, 0.4
    mean = torch.randn(30, 1, generator=generator, dtype=F64)
    draws = torch.randn(200, 30, 1, generator=generator, dtype=F64)
    truth = mean + std * torch.randn(2000, 30, 1, generator=generator, dtype=F64)
    targets = (x[:, None] @ truth)[:, 0, 0] + noise * torch.randn(2000, generator=generator, dtype=F64)

    def outputs_at(scale):
        return x @ (mean + scale * factor * std * (draws - draws.mean(0)))

    found = choose_calibration(outputs_at, targets, Gaussian(noise))
    assert (found.temperature, found.noise_std) == (1.0, noise)
    assert 1 / 2 < found.scale * factor < 2


def test_several_processes_choose_as_one(generator):
    logits = 2 * torch.randn(3, ROWS, CLASSES, generator=generator)
    targets = labels_of(logits.mean(0) / 2, generator)
    whole, labels = torch.cat([logits, logits], 1), torch.cat([targets, targets])
    one = choose_calibration(lambda scale: whole, labels, "softmax")
    same = choose_calibration(lambda scale: logits, targets, "softmax", reduce=lambda total: 2 * total)
    assert same.temperature == pytest.approx(one.temperature, rel=1e-3)
    assert same[2:5] == pytest.approx(one[2:5], rel=1e-3)  # both NLL and the standard error
    assert same.scale == one.scale


def test_every_way_to_predict_applies_width_and_temperature(generator):
    model, x = nn.Linear(6, CLASSES, bias=False), torch.randn(ROWS, 6, generator=generator)
    posterior = linear_posterior(generator)
    y = labels_of(x @ posterior.mean["weight"].T / 3, generator)
    found = calibrate(model, posterior, [(x[:150], y[:150]), (x[150:], y[150:])], samples=5)
    scale, temperature = found.calibration.scale, found.calibration.temperature
    assert temperature > 1.5
    draws = PosteriorSamples(ScaledPosterior(posterior, scale), 5)
    outputs = torch.stack([x @ draws.weights(s)["weight"].T for s in range(5)])
    assert found.calibration.nll == pytest.approx(predictive_nll(outputs / temperature, y, "softmax"), rel=1e-5)
    expected = (outputs / temperature).softmax(-1).mean(0)
    restored = ScaledPosterior.from_state_dict(found.posterior.state_dict())
    for posterior in (found, found.posterior, restored, restored.to("cpu")):
        torch.testing.assert_close(mc_predict(model, posterior, x, samples=5).probs, expected)
    torch.testing.assert_close(MonteCarloNetwork(model, restored, 5)(x)[0], expected)
    unscaled = mc_predict(model, restored, x, samples=5, temperature=1.0).probs
    torch.testing.assert_close(unscaled, outputs.softmax(-1).mean(0))


def test_statistics_of_each_sample_belong_to_each_width(generator):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)).eval()
    x, y = torch.randn(60, 6, generator=generator), torch.arange(60) % CLASSES
    mean = {"0.weight": model[0].weight.detach().clone()}
    constants = {n: v for n, v in model.state_dict().items() if n not in mean}
    posterior = MeanField(mean, {"0.weight": torch.ones(5, 6)}, {"0.weight": 1.0}, num_data=9, constants=constants)
    found = calibrate(model, posterior, [(x, y)], samples=3, recalibrate_on=[x]).calibration
    probs = mc_predict(model, posterior, x, 3, recalibrate_on=[x]).probs
    assert found.nll_before == pytest.approx(nn.functional.nll_loss(probs.log(), y).item(), rel=1e-5)


def test_tokens_and_counts_are_calibrated_by_their_nll(generator):
    logits = torch.randn(3, ROWS, 4, CLASSES, generator=generator)
    classes = labels_of(3 * logits.mean(0).flatten(0, 1), generator).view(ROWS, 4)
    tokens = choose_calibration(lambda scale: logits, classes, "softmax_last")
    moved = choose_calibration(lambda scale: logits.movedim(-1, 2), classes, "softmax")
    assert tokens == pytest.approx(moved)
    assert tokens.nll == pytest.approx(predictive_nll(logits / tokens.temperature, classes, "softmax_last"), rel=1e-5)
    rates = torch.randn(3, ROWS, 2, generator=generator)
    counts = torch.poisson(rates.mean(0).exp(), generator=generator)
    found = choose_calibration(lambda scale: rates.mean(0) + scale * (rates - rates.mean(0)), counts, "exp")
    assert found.temperature == 1
    assert found.nll_before == pytest.approx(predictive_nll(rates, counts, "exp"), rel=1e-5)


def test_what_cannot_be_calibrated_is_named(generator):
    model, outputs = nn.Linear(6, CLASSES, bias=False), torch.zeros(1, 5, CLASSES)
    with pytest.raises(DataError, match=r"calibrate needs validation data, but the loader yields no batch\. Hold out"):
        calibrate(model, linear_posterior(generator), [])
    with pytest.raises(NonFiniteError, match="NLL of the posterior is not finite on the validation data"):
        choose_calibration(lambda scale: outputs * math.nan, torch.zeros(5, dtype=torch.long), "softmax")
