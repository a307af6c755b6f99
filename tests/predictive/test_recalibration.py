"""Recalibrated BatchNorm statistics against explicit loops and torch's `update_bn`."""

from __future__ import annotations

import copy

import pytest
import torch
from of_classes import mc_predict
from posterior_around import mean_field_around
from torch import nn
from torch.optim.swa_utils import update_bn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive import (
    DropoutSamples,
    LinearizedSamples,
    MemberSamples,
    PosteriorSamples,
    recalibrate,
)
from lightning_bayes.predictive.recalibration import running_statistics

S = 3


@pytest.fixture
def model():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(36, 3)).eval()
    net[1].running_mean.fill_(7.0)
    return net


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [3 + 2 * torch.randn(8, 1, 5, 5, generator=generator) for _ in range(4)]


def by_hand(model, weights, batches):
    """A copy with the sample's weights, and with the mean over batches of their means and unbiased variances."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(weights, strict=False)
    with torch.no_grad():
        hidden = [copied[0](batch) for batch in batches]
    copied[1].running_mean = torch.stack([h.mean((0, 2, 3)) for h in hidden]).mean(0)
    copied[1].running_var = torch.stack([h.transpose(0, 1).flatten(1).var(1) for h in hidden]).mean(0)
    return copied


def runs(model, batches):
    return [lambda batch=batch: model(batch) for batch in batches]


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model, before):
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return same and not any(layer.training for layer in model.modules()) and model[1].momentum == 0.1


def test_each_sample_predicts_with_its_own_statistics(model, batches):
    draws, before, x = PosteriorSamples(mean_field_around(model), S), state(model), torch.randn(5, 1, 5, 5)
    found = recalibrate(model, draws, runs(model, batches)).outputs(model, lambda: model(x))
    expected = torch.stack([by_hand(model, draws.weights(index), batches)(x) for index in range(S)])
    torch.testing.assert_close(found, expected)
    assert unchanged(model, before)


def test_the_mean_has_the_statistics_of_update_bn(model, batches):
    samples = recalibrate(model, PosteriorSamples(mean_field_around(model), S), runs(model, batches))
    theirs, x = copy.deepcopy(model), torch.randn(5, 1, 5, 5)
    update_bn(batches, theirs)
    with samples.at_mean(model):
        torch.testing.assert_close(model(x), theirs(x))
        assert model[1].num_batches_tracked == len(batches)


def test_samples_can_share_the_statistics_of_the_mean(model, batches):
    draws, x = PosteriorSamples(mean_field_around(model), S), torch.randn(5, 1, 5, 5)
    passes = []
    counted = [lambda run=run: passes.append(run()) for run in runs(model, batches)]
    found = recalibrate(model, draws, counted, of="mean").outputs(model, lambda: model(x))
    at_mean = running_statistics(by_hand(model, {}, batches))
    for index in range(S):
        with draws.sampled(model, index):
            expected = copy.deepcopy(model)
            expected.load_state_dict(at_mean, strict=False)
            torch.testing.assert_close(found[index], expected(x))
    assert len(passes) == len(batches)


def test_members_of_an_ensemble(model, batches):
    members = [state(model) for _ in range(2)]
    for number, member in enumerate(members):
        member["0.weight"] += number
    x = torch.randn(5, 1, 5, 5)
    found = recalibrate(model, MemberSamples(members), runs(model, batches)).outputs(model, lambda: model(x))
    torch.testing.assert_close(found, torch.stack([by_hand(model, member, batches)(x) for member in members]))


def test_predictions_from_a_posterior(model, batches):
    posterior, x = mean_field_around(model), torch.randn(5, 1, 5, 5)
    before = state(model)
    found = mc_predict(model, posterior, x, samples=S, recalibrate_on=batches)
    draws = PosteriorSamples(posterior, S)
    expected = torch.stack([by_hand(model, draws.weights(index), batches)(x).softmax(-1) for index in range(S)])
    torch.testing.assert_close(found.sample_probs, expected)
    assert unchanged(model, before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_batch_leaves_the_model_unchanged(model, batches, error):
    before = state(model)

    def fail():
        model(batches[0])
        raise error("inside")

    with pytest.raises(error, match="inside"):
        recalibrate(model, PosteriorSamples(mean_field_around(model), S), [*runs(model, batches[:1]), fail])
    assert unchanged(model, before)


def test_a_model_without_running_statistics_keeps_its_samples(batches):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4))
    draws = PosteriorSamples(mean_field_around(net), S)
    assert recalibrate(net, draws, runs(net, batches)) is draws


def test_statistics_are_averaged_over_processes(model, batches):
    draws = PosteriorSamples(mean_field_around(model), S)
    halves = [recalibrate(model, draws, runs(model, half)).statistics for half in (batches[:2], batches[2:])]
    others = iter([value for each in halves[1] for value in each.values()])
    whole = recalibrate(model, draws, runs(model, batches)).statistics
    found = recalibrate(
        model, draws, runs(model, batches[:2]), reduce=lambda mine: (mine + next(others, mine)) / 2
    ).statistics
    for mine, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(mine["1.running_mean"], expected["1.running_mean"])
        torch.testing.assert_close(mine["1.running_var"], expected["1.running_var"])


def test_no_batch_is_refused(model):
    with pytest.raises(HyperparameterError, match=r"There is no batch to estimate BatchNorm's statistics from"):
        recalibrate(model, PosteriorSamples(mean_field_around(model), S), [])


def test_dropout_has_no_statistics_of_a_sample(model, batches):
    with pytest.raises(HyperparameterError, match=r"DropoutSamples are different networks for every batch.*update_bn"):
        recalibrate(model, DropoutSamples([model[2]], S), runs(model, batches))


def test_an_ensemble_has_no_mean(model, batches):
    with pytest.raises(
        HyperparameterError, match=r"MemberSamples have no mean to estimate statistics at\. Use of='sample'"
    ):
        recalibrate(model, MemberSamples([state(model)]), runs(model, batches), of="mean")


def test_an_unknown_owner_of_statistics_is_refused(model, batches):
    with pytest.raises(HyperparameterError, match=r"of='batch' is unknown; use 'sample' or 'mean'"):
        recalibrate(model, PosteriorSamples(mean_field_around(model), S), runs(model, batches), of="batch")


def test_an_expansion_of_one_network_has_the_statistics_of_its_mean(model, batches):
    """f(x, μ) + J (θ - μ) is f(x, μ) under samples that equal the mean."""
    draws, x = LinearizedSamples(PosteriorSamples(mean_field_around(model, precision=1e12), S)), torch.randn(5, 1, 5, 5)
    with pytest.raises(HyperparameterError, match=r"LinearizedSamples are expansions of one network.*Use of='mean'"):
        recalibrate(model, draws, runs(model, batches))
    found = recalibrate(model, draws, runs(model, batches), of="mean").outputs(model, lambda: model(x))
    torch.testing.assert_close(found, by_hand(model, {}, batches)(x).expand(S, -1, -1), atol=1e-3, rtol=1e-3)
