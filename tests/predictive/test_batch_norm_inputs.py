"""Running means that move with sampled weights, against means over the data."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from of_classes import export, mc_predict, save_posterior
from posterior_around import mean_field_around
from torch import nn

from lightning_bayes import zoo
from lightning_bayes.posteriors import ScaledPosterior
from lightning_bayes.predictive import PosteriorSamples
from lightning_bayes.predictive.batch_norm_inputs import centred_means, input_means

S = 5
IMAGES, ROWS = (12, 4, 7, 7), (30, 4)


def data(shape, seed=0):
    return 1 + torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FIRST = {
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), ROWS),
    "linear without bias": (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), ROWS),
    "convolution": (nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), IMAGES),
    "strides, dilation, circular": (
        nn.Conv2d(4, 6, 3, 2, padding=2, dilation=2, padding_mode="circular"),
        nn.BatchNorm2d(6),
        IMAGES,
    ),
    "groups": (nn.Conv2d(4, 6, (2, 3), groups=2), nn.BatchNorm2d(6), IMAGES),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), IMAGES),
    "sequences": (nn.Conv1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (12, 4, 9)),
    "volumes": (nn.Conv3d(4, 3, 2), nn.BatchNorm3d(3), (5, 4, 3, 3, 3)),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_mean_of_each_sample_is_that_over_the_data(case):
    layer, norm, shape = FIRST[case]
    torch.manual_seed(0)
    model, batches = nn.Sequential(layer, norm).eval(), [data(shape, seed) for seed in range(3)]
    dims = [dim for dim in range(len(shape)) if dim != 1]

    def mean_output():
        return torch.stack([layer(x).mean(dims) for x in batches]).mean(0)

    with torch.no_grad():
        norm.running_mean.copy_(mean_output())
        means = input_means(model, [partial(model, x) for x in batches], ["0.weight"])
        assert list(means) == ["1.running_mean"]
        samples = PosteriorSamples(ScaledPosterior(mean_field_around(model), 1.5, input_means=means), S)
        for index in range(S):
            with samples.sampled(model, index):
                torch.testing.assert_close(norm.running_mean, mean_output(), rtol=1e-4, atol=1e-5)


def test_half_precision_does_not_round_the_means():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval(), data(ROWS)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            model(x)

    ((_, mean),) = input_means(model, [run], ["0.weight"]).values()
    torch.testing.assert_close(mean[0], x.mean(0))


class Shared(nn.Module):
    """One layer before two BatchNorm layers, in two calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.one, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.two(self.layer(self.one(self.layer(x))))


class Added(nn.Module):
    """BatchNorm of a sum of two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.one(x) + self.two(x))


class Alternates(nn.Module):
    """BatchNorm of one layer or another."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.one(x)) + self.norm(self.two(x))


OTHERS = {
    "activation before": nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6)),
    "no layer before": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6)),
    "no running mean": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False)),
    "shared": Shared(),
    "sum": Added(),
    "alternates": Alternates(),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_statistics_stay(case):
    model, x = OTHERS[case].eval(), data(ROWS)
    assert input_means(model, [partial(model, x)], dict(model.named_parameters())) == {}


def test_weights_without_noise_and_layers_in_evaluation_mode_are_left_out():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), data(ROWS)
    assert centred_means(model) == {"1.running_mean"}
    assert centred_means(model.eval()) == set()
    assert input_means(model, [partial(model, x)], ["0.bias"]) == {}


@pytest.fixture
def deep():
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    model, x = nn.Sequential(*layers, nn.Linear(6, 3)), data((200, 4))
    model(x)
    model.eval()
    means = input_means(model, [partial(model, x)], dict(model.named_parameters()))
    return model, ScaledPosterior(mean_field_around(model), 0.7, temperature=1.3, input_means=means), x


def by_hand(model, posterior, x):
    """Probabilities of networks whose running means are moved one by one."""
    samples, probs, state = PosteriorSamples(posterior, S), [], {**posterior.constants, **posterior.mean}
    inputs = {"0": x.mean(0), "3": hidden(state, x).mean(0)}
    for index in range(S):
        weights = samples.weights(index)
        change = {name: weights[name] - posterior.mean[name] for name in weights}
        moved = {
            f"{int(layer) + 1}.running_mean": state[f"{int(layer) + 1}.running_mean"]
            + change[f"{layer}.weight"] @ mean
            + change[f"{layer}.bias"]
            for layer, mean in inputs.items()
        }
        logits = torch.func.functional_call(model, {**state, **weights, **moved}, (x,))
        probs.append((logits / posterior.temperature).softmax(1))
    return torch.stack(probs).mean(0)


def hidden(state, x):
    """Inputs of the second layer at the mean."""
    z = x @ state["0.weight"].T + state["0.bias"]
    z = (z - state["1.running_mean"]) / (state["1.running_var"] + 1e-5).sqrt()
    return torch.tanh(z * state["1.weight"] + state["1.bias"])


def test_predictions_files_and_exports_move_the_means(deep, tmp_path):
    model, posterior, x = deep
    with torch.no_grad():
        expected = by_hand(model, posterior, x)
        found = mc_predict(model, posterior, x, samples=S).probs
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        plain = ScaledPosterior(posterior.posterior, 0.7, temperature=1.3)
        assert (mc_predict(model, plain, x, samples=S).probs - expected).abs().max() > 0.01
        save_posterior(tmp_path / "file.safetensors", model, posterior)
        saved = zoo.load(tmp_path / "file.safetensors", model=model)
        assert torch.equal(mc_predict(saved.model, saved.posterior, x, samples=S).probs, found)
        export(model, posterior, tmp_path / "file.pt2", x, samples=S)
        exported = torch.export.load(tmp_path / "file.pt2").module()(x)[0]
        torch.testing.assert_close(exported, found, rtol=1e-4, atol=1e-5)


def test_a_submodule_keeps_its_means(deep):
    model, posterior, x = deep
    task = nn.ModuleDict({"net": model})
    renamed = {f"net.{norm}": (f"net.{weight}", mean) for norm, (weight, mean) in posterior.input_means.items()}
    whole = ScaledPosterior(mean_field_around(task), 0.7, temperature=1.3, input_means=renamed)
    found = mc_predict(model, whole.select("net."), x, samples=S).probs
    torch.testing.assert_close(found, mc_predict(model, posterior, x, samples=S).probs)
    assert ScaledPosterior(posterior, 2.0).input_means == posterior.input_means
