"""Equations that pages state, against a few lines of NumPy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGN, laplace
from lightning_bayes.callbacks.fit.noise_rule import NoiseRule
from lightning_bayes.optim.base_optimizer import LONGEST_MOVE
from lightning_bayes.optim.default_noise import MOST_NOISE_OF_NORMALISED, noise_of_depth
from lightning_bayes.predictive.closed_form import probit, probit_samples

DOCS = Path(__file__).parents[2] / "docs"
N, KAPPA, FLATNESS = 40, 0.2, 0.5


def said(page):
    return " ".join((DOCS / f"{page}.md").read_text("utf-8").split())


def rms(values):
    return np.sqrt(np.mean(np.square(values)))


def trained(**options):
    """The layer at the start, and an optimizer after five steps that shrink its weights."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    start = {name: param.detach().clone().numpy() for name, param in model.named_parameters()}
    base = torch.optim.SGD(model.parameters(), lr=0.2, **options)
    optimizer = VOGN(model, base=base, num_data=N, relative_noise=KAPPA, noise_flatness=FLATNESS, curvature_interval=1)
    x, y = torch.randn(N, 3), torch.zeros(N, 2)
    for _ in range(5):
        with optimizer.sampled_params():
            F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model, start, optimizer


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_precision_and_temperature_of_the_default_step(decay):
    """1/Σ = (N/τ_t)(s + γ_t), 1/τ_t = 1 + mean[1/(s + γ_t)] / (N κ² r_t²), γ_t = δ̃ + ε mean s, δ̃ = wd."""
    model, start, optimizer = trained(weight_decay=decay)
    precision = optimizer.posterior().precision
    for name, param in model.named_parameters():
        s = np.maximum(optimizer.state[param]["curvature"].numpy(), 0)
        gamma = decay + FLATNESS * s.mean()
        size = max(rms(param.detach().numpy()), rms(start["weight"]))  # the bias, too, has its layer's weight
        over_temperature = 1 + (1 / (s + gamma)).mean() / (N * KAPPA**2 * size**2)
        np.testing.assert_allclose(precision[name].numpy(), N * over_temperature * (s + gamma), rtol=1e-4)
    assert rms(model.weight.detach().numpy()) < rms(start["weight"])  # so the size at the start counts
    assert "r_t is the larger of the tensor's root mean squares now and at the start of training" in said("defaults")
    assert "The start of a bias is its layer's weight" in said("defaults")


def test_the_covariance_minimises_the_objective_for_its_temperatures():
    """E_q[f̄] + (τ/N) KL has a derivative of zero at 1/Σ_i = (N/τ)(s_i + γ), γ = τδ/N."""
    s, tau, delta = np.array([0.1, 2.0, 30.0]), 0.3, 5.0

    def objective(variance):
        return (s * variance).sum() / 2 + tau / N * (delta * variance - np.log(variance)).sum() / 2

    best = 1 / (N / tau * (s + tau * delta / N))
    for i in range(len(s)):
        for factor in (0.9, 1.1):
            other = best.copy()
            other[i] *= factor
            assert objective(other) > objective(best)


def test_no_variance_exceeds_its_bound():
    s, epsilon = np.array([0.0, 1.0, 50.0, 3.0]), 0.03
    variance = 1 / (s + epsilon * s.mean())
    assert variance.max() / variance.mean() <= (1 + epsilon) / epsilon


def test_noise_by_depth_and_the_bound_of_a_step():
    assert noise_of_depth(0.3, 20) == pytest.approx(0.3 * math.sqrt(5 / 20))
    assert noise_of_depth(0.3, 5) == 0.3
    assert "κ shrinks as √(5/L)" in said("defaults")
    assert f"moves a tensor by at most {100 * LONGEST_MOVE:.0f} % of its size" in said("defaults")


def test_noise_that_follows_the_fit():
    """κ moves half-way to 2 min(1, max(0, 0.8 min ℓ_val - ℓ) / ℓ₀)."""
    rule, kappa, first, lowest = NoiseRule(), 0.0, 2.0, 1.5
    for loss, nll in ((2.0, 1.5), (0.4, 1.6), (1.4, 1.7)):
        rule.add({"loss": torch.tensor(loss)})
        for _ in range(9):
            rule.add({"loss": torch.tensor(loss)})
        rule.add_validation(nll)
        rule.start_epoch(lambda total: total)
        kappa = kappa / 2 + min(1, max(0, 0.8 * lowest - loss) / first)
        assert MOST_NOISE_OF_NORMALISED * rule.share == pytest.approx(kappa)
    assert "2 min(1, max(0, 0.8 min ℓ_val - ℓ) / ℓ₀)" in said("defaults")


@pytest.mark.parametrize(("variance", "bound"), [(1.0, 1e-5), (10.0, 1e-5), (100.0, 6e-3)])
def test_samples_of_the_closed_form_average_to_the_probit(variance, bound, generator):
    outputs = 3 * torch.randn(200, 5, generator=generator, dtype=torch.float64)
    variances = torch.full_like(outputs, variance)
    logits = (outputs / (1 + math.pi * variance / 8) ** 0.5).numpy()
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    samples = probit_samples(outputs, variances, probit(outputs, variances), 32, -1)
    found = samples.softmax(-1).mean(0).numpy()
    assert np.abs(found - expected).max() < bound
    assert "to 1e-5 up to a variance of 10, and to a few thousandths at 100" in said("laplace")


def test_weight_and_bias_are_independent_under_laplace(generator):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(20, 3, generator=generator), torch.arange(20) % 2)
    posterior = laplace(
        model, DataLoader(data, batch_size=10), "classification", subset="all", require_trained=False
    ).posterior
    assert sorted(map(list, posterior.blocks())) == sorted([name] for name, _ in model.named_parameters())
    assert "a layer's weights and its bias are independent" in " ".join(
        (DOCS.parent / "README.md").read_text("utf-8").split()
    )
