"""IVON's start without settings: the noise of the first pass, the first step, and what turns it off."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from tiny_training import Classifier, loader, mlp, quiet_trainer
from torch import nn

from lightning_bayes import IVONCallback
from lightning_bayes.optim import IVON
from lightning_bayes.optim.diagonal.ivon_start import NOISE, starting_precision, weight_of_old_curvature

EXAMPLES = 400


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 2))


def test_the_first_noise_is_a_tenth_of_the_weights_size():
    model = network()
    size = torch.cat([model[i].weight.detach().flatten() for i in (0, 3)]).square().mean().sqrt()
    torch.testing.assert_close(starting_precision(model), float(1 / (NOISE * size) ** 2))
    opt = IVON(model, lr=1.0, num_data=EXAMPLES)
    before = [p.detach().clone() for p in model.parameters()]
    with opt.sampled_params():
        z = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    z /= NOISE * size
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / len(z))


def test_the_first_step_is_that_of_sgd(generator):
    """Without momentum and with s = s₀, μ ← μ - α s₀ / (s₀ + δ̃) (ĝ + δ̃ μ)."""
    x, y = torch.randn(16, 30, generator=generator), torch.arange(16) % 2
    model = network()
    opt = IVON(model, lr=0.5, betas=(0.0, 1 - 1e-9), num_data=EXAMPLES, prior_precision=8.0)
    with opt.sampled_params():
        F.cross_entropy(model(x), y).backward()
    means = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for mean, param in zip(means, model.parameters(), strict=True):
        mean.grad = param.grad.clone()
    opt.step()
    likelihood = starting_precision(network())
    torch.optim.SGD(means, lr=0.5 * likelihood / (likelihood + 8.0), weight_decay=8.0 / EXAMPLES).step()
    for mean, param in zip(means, model.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), mean.detach(), rtol=1e-4, atol=1e-6)


def test_a_precise_prior_bounds_the_first_noise_from_above():
    model = nn.Linear(200, 200)
    opt = IVON(model, lr=0.1, num_data=EXAMPLES, prior_precision=1e8)
    before = model.weight.detach().clone()
    with opt.sampled_params():
        noise = model.weight.detach() - before
    assert abs(float(noise.square().mean()) * 1e8 - 1) < 4 * math.sqrt(2 / noise.numel())


@pytest.mark.parametrize("weights", [[], [torch.zeros(3)], [torch.zeros(2, 2)]])
def test_weights_of_no_size_count_as_ones(weights):
    model = nn.ParameterList([nn.Parameter(weight) for weight in weights])
    assert starting_precision(model) == pytest.approx(1 / NOISE**2)


def test_the_average_spans_half_of_the_run():
    assert weight_of_old_curvature(200_000) == pytest.approx(0.99999)  # as published
    assert weight_of_old_curvature(1) == 0.5
    callback = IVONCallback(lr=1.0)
    quiet_trainer(callback, max_epochs=3).fit(Classifier(), loader())  # of six batches
    group = callback.optimizer.param_groups[0]["posterior"]
    assert group["betas"] == (0.9, pytest.approx(1 - 2 / 18))
    assert group["rescale_lr"] is True


@pytest.mark.parametrize(
    ("arguments", "rescales", "beta"),
    [
        ({}, False, 0.99999),
        ({"lr": 0.1, "rescale_lr": False}, False, 0.99999),
        ({"lr": 0.1, "init_precision": 1e3}, False, 0.99999),
        ({"lr": 0.1, "betas": (0.9, 0.99)}, True, 0.99),
    ],
)
def test_settings_turn_it_off(arguments, rescales, beta):
    callback = IVONCallback(**arguments)
    quiet_trainer(callback, max_steps=2).fit(Classifier(), loader())
    group = callback.optimizer.param_groups[0]["posterior"]
    assert (group["rescale_lr"], group["betas"][1]) == (rescales, beta)


@pytest.mark.parametrize("name", IVONCallback.presets())
def test_presets_are_as_published(name):
    callback = IVONCallback.from_preset(name)
    quiet_trainer(callback, max_steps=2).fit(Classifier(), loader())
    group = callback.optimizer.param_groups[0]["posterior"]
    expected = IVONCallback.presets()[name].arguments
    assert {n: group[n] for n in ("betas", "init_precision", "rescale_lr")} == {
        n: expected[n] for n in ("betas", "init_precision", "rescale_lr")
    }


def test_a_resumed_run_is_bit_equal_and_says_nothing(tmp_path):
    class Save(Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, resumed = Classifier(), Classifier(net=mlp(seed=1))
    quiet_trainer(IVONCallback(lr=0.5), Save(), max_epochs=4).fit(whole, loader())
    quiet_trainer(IVONCallback(lr=0.5), max_epochs=4).fit(resumed, loader(), ckpt_path=tmp_path / "middle.ckpt")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
