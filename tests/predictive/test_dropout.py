"""Monte-Carlo dropout: distribution of the passes, random numbers, and restored state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_bayes.predictive import DropoutSamples, dropout_layers

S = 4000


def outputs(model, x, count=S, seed=0):
    return DropoutSamples(dropout_layers(model), count, seed).outputs(model, lambda: model(x))


@torch.no_grad()
def test_moments_of_a_linear_layer_behind_dropout(generator):
    """y = Σ w x b/(1-p) with b ~ Bernoulli(1-p) has the mean Σ w x and the variance Σ (w x)² p/(1-p)."""
    p, weight, x = 0.3, torch.randn(20, generator=generator), torch.randn(20, generator=generator)
    model = nn.Sequential(nn.Dropout(p), nn.Linear(20, 1, bias=False)).eval()
    model[1].weight.copy_(weight[None])
    draws = outputs(model, x[None])[:, 0, 0]
    variance = ((weight * x).square() * p / (1 - p)).sum()
    assert abs(draws.mean() - (weight * x).sum()) < 4 * (variance / S).sqrt()
    assert abs(draws.var() / variance - 1) < 4 * math.sqrt(2 / S)


@torch.no_grad()
def test_a_probability_of_zero_is_deterministic(generator):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0)).eval(), torch.randn(3, 4, generator=generator)
    found = outputs(model, x, 3)
    assert all(torch.equal(one, model(x)) for one in found)


@torch.no_grad()
def test_passes_are_reproducible_and_differ_by_seed_pass_and_call(generator):
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1)).eval(), torch.randn(2, 50, generator=generator)
    assert torch.equal(outputs(model, x, 4, seed=1), outputs(model, x, 4, seed=1))
    assert not torch.equal(outputs(model, x, 4, seed=1), outputs(model, x, 4, seed=2))
    samples = DropoutSamples(dropout_layers(model), 4)
    first, second = (samples.outputs(model, lambda: model(x)) for _ in range(2))
    assert len(torch.cat([first, second]).flatten().unique()) == 2 * 4 * 2


@torch.no_grad()
def test_global_random_state_and_modes_are_restored_also_after_an_exception():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Dropout(0.1)).eval()
    model[2].train()
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    statistics = model[1].running_mean.clone()

    def breaks():
        model(torch.randn(3, 4))
        raise ValueError("broken")

    outputs(model, torch.ones(3, 4), 2)
    with pytest.raises(ValueError, match="broken"):
        DropoutSamples(dropout_layers(model), 2).outputs(model, breaks)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1].running_mean, statistics)


LAYERS = {
    "Dropout": lambda: nn.Dropout(0.5),
    "Dropout1d": lambda: nn.Dropout1d(0.5),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "inside a transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
    "inside an encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True), 2
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_dropout_is_active(name, generator):
    """In evaluation mode a transformer layer would use a fast path without dropout."""
    model, x = LAYERS[name]().eval(), torch.randn(2, 3, 4, generator=generator)
    assert torch.equal(model(x), model(x))
    first, second = outputs(model, x, 2)
    assert not torch.equal(first, second)


@torch.no_grad()
@pytest.mark.parametrize("layer", [nn.LSTM(4, 3, num_layers=2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5)])
def test_dropout_inside_recurrent_and_attention_layers_is_active(layer, generator):
    layer.eval()
    x = torch.randn(5, 2, 4, generator=generator)
    inputs = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    samples = DropoutSamples(dropout_layers(layer), 2)
    first, second = samples.outputs(layer, lambda: layer(*inputs)[0])
    assert not torch.equal(first, second)


@pytest.mark.gpu
def test_the_random_state_of_an_accelerator_is_restored():
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1)).cuda().eval(), torch.ones(2, 50, device="cuda")
    state = torch.cuda.get_rng_state()
    assert torch.equal(outputs(model, x, 4), outputs(model, x, 4))
    assert torch.equal(torch.cuda.get_rng_state(), state)
