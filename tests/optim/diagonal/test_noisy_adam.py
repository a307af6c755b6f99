"""Noisy Adam against Algorithm 1 in its own letters, and exact posteriors where the Fisher is the Hessian."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import half_squares
from torch import nn

from lightning_bayes.optim import VOGN, NoisyAdam, NoisyAdamFisher

F64 = torch.float64


def regression(generator, n=40, noise=1.0):
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    y = x @ torch.randn(3, 1, generator=generator, dtype=F64)
    return x, y + noise * torch.randn(n, 1, generator=generator, dtype=F64)


def linear():
    torch.manual_seed(3)
    return nn.Linear(3, 1, bias=False).double()


@pytest.mark.parametrize("kl_weight", [1.0, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_steps_at_recorded_samples_are_algorithm_1(kl_weight, reduction, generator):
    """Ascent on log p, prior at the sample, γ_ex not in the noise, bias correction of m̃ but not f; mean or sum of losses."""
    x, y = regression(generator)
    model = linear()
    n, variance, external = 40, 0.25, 0.01  # N, η, γ_ex
    opt = NoisyAdam(
        model,
        lr=0.05,
        betas=(0.9, 0.95),
        num_data=n,
        prior_precision=1 / variance,
        kl_weight=kl_weight,
        damping=external,
        init_precision=1 / variance,
    )
    internal = kl_weight / (n * variance)
    mu, m, f = (model.weight.detach().clone()[0], torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64))
    for k in range(1, 41):
        rows = slice(k % 30, k % 30 + 10)
        with opt.sampled_params():
            w = model.weight.detach().clone()[0]
            loss = half_squares(model, x[rows], y[rows])
            (loss if reduction == "mean" else 0.5 * F.mse_loss(model(x[rows]), y[rows], reduction="sum")).backward()
        opt.step()
        ascent = -(x[rows] * (x[rows] @ w[:, None] - y[rows])).mean(0)
        m = 0.9 * m + 0.1 * (ascent - internal * w)
        f = 0.95 * f + 0.05 * ascent**2
        mu = mu + 0.05 * (m / (1 - 0.9**k)) / (f + internal + external)
        torch.testing.assert_close(model.weight.detach()[0], mu, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(opt.posterior().precision["weight"][0], n / kl_weight * (f + internal))
        mu = model.weight.detach().clone()[0]


def test_the_prior_s_gradient_is_part_of_the_pass(generator):
    """Clipping applies to g + δ̃(θ - μ), in the scale of the loss, averaged over samples like g."""
    x, y = regression(generator)
    model = linear()
    opt = NoisyAdam(model, num_data=100, prior_precision=30.0, init_precision=60.0, mc_samples=2)
    mean, expected = model.weight.detach().clone(), []
    for _ in range(2):
        with opt.sampled_params(loss_scale=1024.0):
            theta = model.weight.detach().clone()
            (1024 * half_squares(model, x[:8], y[:8])).backward()
        grad = (x[:8] * (x[:8] @ theta.T - y[:8])).mean(0, keepdim=True)
        expected.append(1024 * (grad + 0.3 * (theta - mean)))
    torch.testing.assert_close(model.weight.grad, torch.stack(expected).mean(0))


def test_the_prior_s_gradient_at_the_samples_is_averaged_over_passes_whose_gradients_add_up(generator):
    """g = Σ_p g_p + mean_p δ̃(θ_p - μ), as plain PyTorch adds a weight decay once."""
    x, y = regression(generator)
    model = linear()
    opt = NoisyAdam(model, num_data=100, prior_precision=30.0, init_precision=60.0)
    mean, grads, noises = model.weight.detach().clone(), [], []
    for _ in range(3):
        with opt.sampled_params():
            theta = model.weight.detach().clone()
            half_squares(model, x[:8], y[:8]).backward()
        grads.append((x[:8] * (x[:8] @ theta.T - y[:8])).mean(0, keepdim=True))
        noises.append(theta - mean)
    torch.testing.assert_close(model.weight.grad, torch.stack(grads).sum(0) + 0.3 * torch.stack(noises).mean(0))


def test_the_prior_s_gradient_at_the_samples_counts_like_the_examples_of_summed_losses(generator):
    """g = Σ_p n_p (ḡ_p + δ̃(θ_p - μ)) / Σ_p n_p: micro-batches whose losses are added up are one batch."""
    x, y = regression(generator)
    model = linear()
    opt = NoisyAdam(model, num_data=100, prior_precision=30.0, init_precision=60.0)
    mean, expected = model.weight.detach().clone(), []
    for rows in (slice(0, 8), slice(8, 12), slice(12, 14)):
        with opt.sampled_params():
            theta = model.weight.detach().clone()
            (0.5 * F.mse_loss(model(x[rows]), y[rows], reduction="sum")).backward()
        residuals = x[rows] @ theta.T - y[rows]
        expected += (x[rows] * residuals + 0.3 * (theta - mean)).unbind()
    torch.testing.assert_close(model.weight.grad[0], torch.stack(expected).mean(0))


def test_unused_parameters_are_pulled_to_the_prior_at_their_samples(generator):
    x, y = regression(generator)
    model = nn.ModuleDict({"used": linear(), "unused": linear()})
    opt = NoisyAdam(model, lr=0.1, betas=(0.0, 0.9), num_data=100, prior_precision=30.0, init_precision=60.0)
    mean = model["unused"].weight.detach().clone()
    with opt.sampled_params():
        theta = model["unused"].weight.detach().clone()
        half_squares(model["used"], x[:8], y[:8]).backward()
    opt.step()
    curvature = 0.9 * (60.0 - 30.0) / 100
    torch.testing.assert_close(model["unused"].weight.detach(), mean - 0.1 * 0.3 * theta / (curvature + 0.3))


def test_first_pass_without_noise_has_the_prior_at_the_mean(generator):
    """θ = μ without noise, so with one example the step and the curvature are VOGN's."""
    x, y = regression(generator)
    weights = []
    for optimizer in (NoisyAdam, VOGN):
        model = linear()
        opt = optimizer(model, lr=0.1, num_data=40, prior_precision=4.0)
        with opt.sampled_params():
            half_squares(model, x[:1], y[:1]).backward()
        opt.step()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-12)


def test_fisher_form_has_the_exact_posterior_of_linear_regression(generator):
    """The Fisher with labels from the model is the Hessian: the diagonal of the exact precision (algorithms E4)."""
    x, y = regression(generator)
    model = linear()
    opt = NoisyAdamFisher(model, lr=0.02, betas=(0.9, 0.9), num_data=40, prior_precision=2.0)
    means = []
    for t in range(900):
        with opt.sampled_params():
            F.mse_loss(model(x / 2**0.5), y / 2**0.5).backward()  # half the squares; BackPACK supports no scaled loss
        opt.step()
        if t > 100:
            means.append(model.weight.detach().clone()[0])
    exact = x.T @ x + 2 * torch.eye(3, dtype=F64)
    torch.testing.assert_close(opt.posterior().precision["weight"][0], exact.diagonal(), rtol=1e-9, atol=0)
    error = torch.stack(means).mean(0) - torch.linalg.solve(exact, x.T @ y)[:, 0]
    assert (error.abs() * exact.diagonal().sqrt()).max() < 0.2  # in units of the posterior's std
