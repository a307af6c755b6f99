"""Vadam against torch's Adam, the paper's pseudo-code and the laws of its noise."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on, weights
from torch import nn

from lightning_bayes.optim import LinearSchedule, Vadam
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.vadam import update

F64 = torch.float64


@pytest.fixture
def data(generator):
    x = torch.randn(60, 4, generator=generator, dtype=F64)
    labels = (x[:, 0] + 0.5 * torch.randn(60, generator=generator, dtype=F64) > 0).long()
    return x, labels


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(data, count, size=8):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        rows = torch.randint(0, len(data[0]), (size,), generator=generator)
        yield data[0][rows], data[1][rows]


def noisy_step(opt, model, x, y):
    train_on(opt, lambda: F.cross_entropy(model(x), y))


def test_pure_update_is_the_pseudo_code_line_by_line():
    """Khan et al. 2018, Fig. 1, with numbers by hand: γ₁ = 0.5, γ₂ = 0.8, λ̃ = 0.1, α = 0.2, the second step."""
    start = MeanFieldState(*(torch.tensor([v], dtype=F64) for v in (2.0, 0.3, 0.4)))
    grad = torch.tensor([0.6], dtype=F64)
    new = update(start, grad, grad**2, lr=0.2, betas=(0.5, 0.8), prior=0.1, step=2, from_zero=True)
    m = 0.5 * 0.4 + 0.5 * (0.6 + 0.1 * 2.0)
    s = 0.8 * 0.3 + 0.2 * 0.36
    assert new.momentum.item() == pytest.approx(m)
    assert new.curvature.item() == pytest.approx(s)
    expected = 2.0 - 0.2 * (m / (1 - 0.25)) / (math.sqrt(s / (1 - 0.64)) + 0.1)
    assert new.mean.item() == pytest.approx(expected)


def test_without_noise_and_prior_it_is_torch_s_adam(data):
    """Noise and prior are negligible: N = 1e40 and δ = 1e25, so δ̃ = 1e-15 and the std is at most 3e-13."""
    model, reference = network(), network()
    opt = Vadam(
        model, lr=0.01, betas=(0.9, 0.99), num_data=10**40, prior_precision=1e25, init_precision=1e25, damping=1e-8
    )
    adam = torch.optim.Adam(reference.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for x, y in batches(data, 150):
        noisy_step(opt, model, x, y)
        adam.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        adam.step()
        torch.testing.assert_close(weights(model), weights(reference), rtol=1e-7, atol=1e-8)


def test_without_noise_it_is_adam_with_the_prior_in_the_momentum_alone(data):
    """ε = λ̃; the prior's gradient is in m and not in s, where torch's weight_decay puts it too (algorithms E11)."""
    prior = 0.05
    state = MeanFieldState(torch.ones(4, dtype=F64), torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64))
    w, m, v = torch.ones(4, dtype=F64), torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64)
    with_penalty = nn.Parameter(torch.ones(4, dtype=F64))
    adam = torch.optim.Adam([with_penalty], lr=0.01, betas=(0.9, 0.99), eps=prior, weight_decay=prior)

    def gradient(weights, x, y):
        return x.T @ (torch.sigmoid(x @ weights) - y) / len(x)

    for t, (x, y) in enumerate(batches(data, 120), start=1):
        g = gradient(state.mean, x, y)
        state = update(state, g, g**2, lr=0.01, betas=(0.9, 0.99), prior=prior, step=t, from_zero=True)
        g = gradient(w, x, y)
        m = 0.9 * m + 0.1 * (g + prior * w)
        v = 0.99 * v + 0.01 * g**2
        w = w - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + prior)
        torch.testing.assert_close(state.mean, w, rtol=1e-10, atol=1e-12)
        with_penalty.grad = gradient(with_penalty.detach(), x, y)
        adam.step()
    assert (with_penalty - w).abs().max() > 1e-3


@pytest.mark.parametrize("start", ["zero", "above the prior", "first batch"])
def test_steps_at_recorded_samples_are_the_paper_s(start, data):
    """The whole optimizer, with noise: Fig. 1 transcribed, given the samples that it drew."""
    x, y = data[0], data[1].to(F64)[:, None]
    model = nn.Linear(4, 1, bias=False).double()
    delta, n = 3.0, 200
    init = {"zero": delta, "above the prior": 50.0, "first batch": None}[start]
    opt = Vadam(model, lr=0.02, betas=(0.9, 0.95), num_data=n, prior_precision=delta, init_precision=init)
    mu, m = model.weight.detach().clone(), torch.zeros(1, 4, dtype=F64)
    s = None if init is None else torch.full((1, 4), (init - delta) / n, dtype=F64)
    for t in range(1, 31):
        rows = slice(t, t + 8)
        with opt.sampled_params():
            theta = model.weight.detach().clone()
            F.binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
        opt.step()
        assert torch.equal(theta, mu) == (s is None)
        g = ((torch.sigmoid(x[rows] @ theta.T) - y[rows]) * x[rows]).mean(0, keepdim=True)
        s = g**2 if s is None else s
        m = 0.9 * m + 0.1 * (g + delta / n * mu)
        s = 0.95 * s + 0.05 * g**2
        corrected = s / (1 - 0.95**t) if start == "zero" else s
        mu = mu - 0.02 * (m / (1 - 0.9**t)) / (corrected.sqrt() + delta / n)
        torch.testing.assert_close(model.weight.detach(), mu, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(opt.posterior().precision["weight"], n * s + delta)  # s without correction
        mu = model.weight.detach().clone()


def test_a_schedule_of_the_prior_does_not_change_where_s_started(data):
    """The bias correction remains after the prior exceeds the initial precision, and no error is raised."""
    grows = LinearSchedule(1.0, 10.0, steps=2)
    model = network()
    opt = Vadam(model, num_data=10**6, prior_precision=grows, init_precision=1.0)
    for x, y in batches(data, 5):
        noisy_step(opt, model, x, y)
    assert opt.param_groups[0]["posterior"]["from_zero"] is True
    assert opt.param_groups[0]["posterior"]["prior_precision"] == 10.0
