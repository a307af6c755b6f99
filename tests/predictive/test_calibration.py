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
from lightning_bayes.posteriors import ScaledPosterior
from lightning_bayes.predictive import PosteriorSamples, choose_calibration, predictive_nll

CLASSES, ROWS = 4, 400


def labels_of(logits, generator):
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def linear_posterior(generator, precision=25.0):
    mean = {"weight": 2 * torch.randn(CLASSES, 6, generator=generator)}
    return MeanField(mean, {"weight": torch.full((CLASSES, 6), precision)}, {"weight": 1.0}, num_data=50)


def test_a_prediction_that_is_right_is_left_alone():
    """Without an effect, a fitted number lowers the NLL by more than its standard error if |z| > 2: in 5 % of the cases."""
    changed, repeats = 0, 60
    for seed in range(repeats):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, ROWS, CLASSES, generator=generator)
        found = choose_calibration(lambda scale, logits=logits: logits, labels_of(logits[0], generator), "softmax")
        changed += found.choice != "neither"
        assert found.nll <= found.nll_before
    assert changed <= 0.05 * repeats + 3 * math.sqrt(0.05 * 0.95 * repeats)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_logits_of_another_scale_are_divided_by_it(factor, generator):
    logits = torch.randn(ROWS * 10, CLASSES, generator=generator)
    targets = labels_of(logits, generator)
    found = choose_calibration(lambda scale: factor * logits[None], targets, "softmax")
    assert (found.choice, found.scale) == ("temperature", 1.0)
    assert found.temperature == pytest.approx(factor, rel=0.1)
    assert found.nll == pytest.approx(predictive_nll(factor * logits[None] / found.temperature, targets, "softmax"))
    assert found.nll_before - found.nll > found.standard_error


@pytest.mark.parametrize(("share", "choice"), [(0.9, "temperature"), (1.1, "neither")])
def test_a_change_lowers_the_nll_by_so_many_standard_errors(share, choice, generator):
    logits = 1.5 * torch.randn(ROWS, CLASSES, generator=generator)
    targets = labels_of(logits / 1.5, generator)
    scaled = logits[None]
    free = choose_calibration(lambda scale: scaled, targets, "softmax", errors=0.0)
    gain = (free.nll_before - free.nll) / free.standard_error
    found = choose_calibration(lambda scale: scaled, targets, "softmax", errors=share * gain)
    assert free.choice == "temperature"
    assert found.choice == choice


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_validation_data_without_an_error_do_not_ask_for_infinite_confidence(link):
    """The best T of n right examples and half a one whose class is drawn by chance, by its stationarity in closed form."""
    rows, margin = 150, 4.0
    outputs = torch.tensor([[[margin, 0.0]]] if link == "softmax" else [[[margin]]]).expand(1, rows, -1)
    targets = torch.zeros(rows).long() if link == "softmax" else torch.ones(rows)
    found = choose_calibration(lambda scale: outputs, targets, link)
    confidence = (rows + 0.25) / (rows + 0.5)  # sigmoid(margin / T)
    assert found.temperature == pytest.approx(margin / math.log(confidence / (1 - confidence)), rel=0.01)


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

    found = choose_calibration(outputs_at, targets, "identity", noise)
    assert (found.choice, found.temperature, found.noise_std) == ("width", 1.0, noise)
    assert 1 / 2 < found.scale * factor < 2


def test_a_change_that_helps_by_less_than_a_thousandth_is_not_made():
    outputs, targets = torch.zeros(1, 1000, 2), torch.arange(1000) % 2
    tiny = torch.tensor([0.02, 0.0])  # NLL 5e-5 above that of even odds, without noise in the difference
    assert choose_calibration(lambda scale: outputs + (scale > 0) * tiny, targets, "softmax").choice == "neither"


def test_several_processes_choose_as_one(generator):
    logits = 2 * torch.randn(3, ROWS, CLASSES, generator=generator)
    targets = labels_of(logits.mean(0) / 2, generator)
    one = choose_calibration(lambda scale: logits, targets, "softmax")
    same = choose_calibration(
        lambda scale: logits, targets, "softmax", reduce=lambda total: 2 * total
    )  # twice the data
    assert same.temperature == pytest.approx(one.temperature, rel=0.01)
    assert (same.choice, same.nll) == (one.choice, pytest.approx(one.nll, rel=1e-3))
    assert same.standard_error == pytest.approx(one.standard_error / math.sqrt(2), rel=0.02)


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
    assert tokens == moved
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
