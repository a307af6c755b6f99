"""VOGN against what Osawa et al. 2019 ran, by a transcription of their code's steps (algorithms E13)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from lightning_bayes.optim import VOGN

F64 = torch.float64
SETTINGS = {"lr": 0.01, "num_data": 200, "prior_variance": 0.5, "damping": 0.01, "kl_start": 0.1}


class Published:
    """Their update in their letters, with β the weight of the NEW curvature and of the new prior term.

    Args:
        averages_prior: As they do it, the prior's part of the preconditioner and of the noise is an average over updates,
            and the noise has the average of the update before; else both have the prior of the KL weight that holds.
    """

    def __init__(self, averages_prior, *, momentum, ema_decay, warmup, **settings):
        self.averages_prior, self.momentum, self.ema_decay, self.warmup = averages_prior, momentum, ema_decay, warmup
        self.settings, self.steps, self.buffer, self.ema, self.l2_ema = settings, 0, 0, None, None

    @property
    def kl(self):
        done = min(1, self.steps / self.warmup) if self.warmup else 1
        return self.settings["kl_start"] + done * (1 - self.settings["kl_start"])

    @property
    def l2(self):
        return self.kl / (self.settings["num_data"] * self.settings["prior_variance"])

    def _average(self, new, old):
        return new if old is None else self.ema_decay * new + (1 - self.ema_decay) * old

    def _inverse(self):
        return 1 / (self.ema + self.settings["damping"] + (self.l2_ema if self.averages_prior else self.l2))

    def step(self, mean, grads):
        self.buffer = self.momentum * self.buffer + grads.mean(0) + self.l2 * mean  # raw: no (1 - momentum)
        self.ema, self.l2_ema = self._average(grads.square().mean(0), self.ema), self._average(self.l2, self.l2_ema)
        mean = mean - self.settings["lr"] * self._inverse() * self.buffer
        self.steps += 1  # the KL weight is now that of the next update
        return mean, (self.kl / self.settings["num_data"] * self._inverse()).sqrt()


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def per_example_gradients(theta, x, y):
    """``[examples, parameters]`` of `network`, by the chain rule."""
    first, first_bias, last, last_bias = theta.split([12, 4, 4, 1])
    hidden = torch.tanh(x @ first.view(4, 3).T + first_bias)
    residual = torch.sigmoid(hidden @ last[:, None] + last_bias) - y
    back = residual * last * (1 - hidden.square())
    return torch.cat([(back[:, :, None] * x[:, None]).flatten(1), back, residual * hidden, residual], 1)


def compared(published, generator):
    """Their and our mean and standard deviation after each update, with the same mean before it and the same noise."""
    momentum, settings = published.momentum, published.settings
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    y = (x[:, :1] > 0).to(F64)
    model = network()
    opt = VOGN(
        model,
        lr=lambda t: settings["lr"] * (1 - momentum ** (t + 1)) / (1 - momentum),  # undoes the bias correction
        betas=(momentum, 1 - published.ema_decay),
        num_data=settings["num_data"],
        prior_precision=1 / settings["prior_variance"],
        kl_warmup_steps=published.warmup,
        kl_warmup_init=settings["kl_start"],
        damping=settings["damping"],
        damping_in_noise=True,
    )
    for t in range(30):
        rows, mean = slice(t, t + 10), parameters_to_vector(model.parameters()).detach()
        with opt.sampled_params():
            theta = parameters_to_vector(model.parameters()).detach()
            F.binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
        opt.step()
        assert torch.equal(theta, mean) == (t == 0)  # their first step has no noise either
        grads = per_example_gradients(theta, x[rows], y[rows])
        std = torch.cat([opt.posterior().std[name].flatten() for name, _ in model.named_parameters()])
        yield (*published.step(mean, grads), parameters_to_vector(model.parameters()).detach(), std)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("warmup", [0, 20], ids=["no warm-up", "warm-up"])
def test_steps_at_recorded_samples_are_those_of_the_released_code_but_for_its_averaged_prior(
    momentum, warmup, generator
):
    published = Published(False, momentum=momentum, ema_decay=0.9, warmup=warmup, **SETTINGS)
    for mean, std, ours, our_std in compared(published, generator):
        torch.testing.assert_close(ours, mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(our_std, std, rtol=1e-9, atol=0)
    assert published.kl == 1


def test_without_warm_up_nothing_differs(generator):
    published = Published(True, momentum=0.9, ema_decay=0.9, warmup=0, **SETTINGS)
    for mean, std, ours, our_std in compared(published, generator):
        torch.testing.assert_close(ours, mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(our_std, std, rtol=1e-9, atol=0)


def test_their_averaged_prior_hardly_differs_with_their_weight_of_the_new_curvature(generator):
    """β₂ is 0.999 in all their CIFAR configurations with a warm-up, which is longer than the 300 updates here."""
    published = Published(True, momentum=0.9, ema_decay=0.999, warmup=300, **SETTINGS)
    for mean, std, ours, our_std in compared(published, generator):
        torch.testing.assert_close(ours, mean, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(our_std, std, rtol=3e-3, atol=0)
