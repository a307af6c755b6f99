"""IVON against its published equations, transcribed here, and against conjugate models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
from optimizer_family import half_squares, reparameterised, train_on
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import IVON
from lightning_bayes.optim.diagonal.ivon import update
from lightning_bayes.optim.diagonal.state import MeanFieldState

F64 = torch.float64


def published_step(m, h, g, t, *, theta, grad, lr, beta1, beta2, delta, ess, clip=math.inf):
    """Shen et al. 2024, Algorithm 1, in its own letters: λ is the effective sample size, δ the weight decay."""
    variance = 1 / (ess * (h + delta))
    hessian = grad * (theta - m) / variance
    g = beta1 * g + (1 - beta1) * grad
    h = beta2 * h + (1 - beta2) * hessian + 0.5 * (1 - beta2) ** 2 * (h - hessian) ** 2 / (h + delta)
    m = m - lr * np.clip((g / (1 - beta1**t) + delta * m) / (h + delta), -clip, clip)
    return m, h, g


def test_pure_update_is_the_published_one():
    """200 steps of random gradients at random samples, with negative curvatures among them."""
    random = np.random.default_rng(0)
    m, h, g = random.normal(size=5), np.full(5, 0.3), np.zeros(5)
    ess, delta, negative = 400.0, 0.01, 0
    state = MeanFieldState(*(torch.from_numpy(value) for value in (m, h, g)))
    for t in range(1, 201):
        theta = m + random.normal(size=5) / np.sqrt(ess * (h + delta))
        grad = random.normal(size=5)
        hessian = torch.from_numpy(grad * (theta - m) * ess * (h + delta))
        negative += int((hessian < 0).sum())
        state = update(
            state, torch.from_numpy(grad), hessian, lr=0.1, betas=(0.9, 0.999), prior=delta, step=t, clip_radius=0.5
        )
        m, h, g = published_step(
            m, h, g, t, theta=theta, grad=grad, lr=0.1, beta1=0.9, beta2=0.999, delta=delta, ess=ess, clip=0.5
        )
        for found, expected in zip(state, (m, h, g), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert negative > 100


@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_optimizer_takes_the_published_steps_at_the_samples_it_drew(kl_weight, generator):
    """λ = Ñ/τ and δ = τ·prior/Ñ, h₀ from the initial precision; the learning rate is rescaled by h₀ + δ."""
    x = torch.randn(60, 3, generator=generator, dtype=F64)
    y = (x[:, :1] > 0).to(F64)
    model = nn.Linear(3, 1, bias=False).double()
    opt = IVON(
        model,
        lr=0.2,
        betas=(0.9, 0.99),
        num_data=60,
        prior_precision=2.0,
        kl_weight=kl_weight,
        init_precision=50.0,
        rescale_lr=True,
    )
    ess, delta = 60 / kl_weight, 2.0 * kl_weight / 60
    m, g = model.weight.detach().numpy()[0].copy(), np.zeros(3)
    h = np.full(3, 50.0 / ess - delta)
    lr = 0.2 * (h[0] + delta)
    for t in range(1, 41):
        rows = slice(t % 50, t % 50 + 10)
        with opt.sampled_params():
            theta = model.weight.detach().numpy()[0].copy()
            F.binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
        opt.step()
        inputs, labels = x[rows].numpy(), y[rows].numpy()[:, 0]
        grad = inputs.T @ (1 / (1 + np.exp(-inputs @ theta)) - labels) / len(inputs)
        m, h, g = published_step(m, h, g, t, theta=theta, grad=grad, lr=lr, beta1=0.9, beta2=0.99, delta=delta, ess=ess)
        np.testing.assert_allclose(model.weight.detach().numpy()[0], m, rtol=1e-8)
        np.testing.assert_allclose(opt.posterior().precision["weight"].numpy()[0], ess * (h + delta), rtol=1e-8)
        m = model.weight.detach().numpy()[0].copy()


@pytest.mark.parametrize("power", [2, 3, 4, 6])
@pytest.mark.parametrize("mean", [-0.7, 0.0, 1.3])
def test_reparameterised_hessian_has_the_mean_of_the_hessian(power, mean):
    """Price's theorem for f = xᵖ: E[f'(θ)(θ-μ)/Σ] = E[f''(θ)], both by Gauss-Hermite quadrature, exact for polynomials."""
    nodes, weights = hermegauss(20)
    precision = 4.0
    theta = torch.tensor(mean + nodes / math.sqrt(precision))
    weights = torch.tensor(weights / weights.sum())
    estimates = reparameterised(
        power * theta ** (power - 1), theta, torch.tensor(mean, dtype=F64), torch.tensor(precision, dtype=F64)
    )
    hessians = power * (power - 1) * theta ** (power - 2)
    torch.testing.assert_close((weights * estimates).sum(), (weights * hessians).sum(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.99999])
def test_precision_stays_positive_for_every_curvature(dtype, beta2, generator):
    """ĥ of both signs over 60 orders of magnitude, 200 times in a row; also the worst one, which halves s + δ̃."""
    prior = 1e-3
    zeros = torch.zeros(2000, dtype=dtype)
    state = MeanFieldState(zeros, torch.full_like(zeros, 0.2), zeros)
    for _ in range(200):
        size = 10 ** (60 * torch.rand(2000, generator=generator) - 30).clamp_max(12).to(dtype)
        hessian = size * torch.sign(torch.randn(2000, generator=generator)).to(dtype)
        hessian[:1000] = (state.curvature - (state.curvature + prior) / (1 - beta2))[:1000]  # x = -1
        new = update(state, zeros, hessian, lr=0.1, betas=(0.9, beta2), prior=prior)
        assert ((new.curvature + prior) > 0).all()
        assert new.mean.isfinite().all()
        state = state._replace(curvature=new.curvature.clamp_max(1e3))  # so that small values recur


def test_posterior_of_linear_regression_is_the_mean_field_optimum(generator):
    """Mean and precision, late averages: the exact mean, and the diagonal of the exact precision (algorithms E2)."""
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    y = x @ torch.randn(3, 1, generator=generator, dtype=F64) + torch.randn(40, 1, generator=generator, dtype=F64)
    model = nn.Linear(3, 1, bias=False).double()
    opt = IVON(model, lr=0.03, betas=(0.9, 0.996), num_data=40, prior_precision=1.0, init_precision=40.0)
    means, precisions = [], []
    for t in range(2000):
        train_on(opt, lambda: half_squares(model, x, y))
        if t > 500:
            means.append(model.weight.detach().clone()[0])
        if t > 500 and t % 20 == 0:
            precisions.append(opt.posterior().precision["weight"][0])
    exact = x.T @ x + torch.eye(3, dtype=F64)
    torch.testing.assert_close(torch.stack(precisions).mean(0), exact.diagonal(), rtol=0.1, atol=0)
    error = torch.stack(means).mean(0) - torch.linalg.solve(exact, x.T @ y)[:, 0]
    assert (error.abs() * exact.diagonal().sqrt()).max() < 0.2  # in units of the posterior's std


def test_clipping_bounds_each_weight_s_step():
    state = MeanFieldState(torch.zeros(3), torch.full((3,), 0.1), torch.zeros(3))
    grad = torch.tensor([1.0, -1.0, 1e-3])
    new = update(state, grad, state.curvature, lr=0.5, betas=(0.0, 0.9), prior=0.1, clip_radius=2.0)
    torch.testing.assert_close(new.mean, torch.tensor([-1.0, 1.0, -0.5 * 1e-3 / 0.2]))


def regression_step(model, opt, x, y):
    train_on(opt, lambda: half_squares(model, x, y))


def test_the_bound_of_the_step_may_be_a_function_of_the_step(generator):
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
    trained = []
    for start, bounds in ((lambda t: 0.1 / (t + 1), None), (0.1, [0.1, 0.05, 0.1 / 3])):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        opt = IVON(model, lr=0.5, num_data=100, init_precision=10.0, clip_radius=start)
        for t in range(3):
            if bounds is not None:
                opt.param_groups[0]["posterior"]["clip_radius"] = bounds[t]
            regression_step(model, opt, x, y)
        trained.append(model.weight.detach())
    assert torch.equal(*trained)


def test_a_rescaled_rate_is_that_of_the_start_also_while_the_kl_weight_warms_up(generator):
    """α τ₀P₀/Ñ at every update, as the authors' code multiplies once by its initial Hessian and weight decay."""
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
    trained = []
    for rate in ({"lr": 0.5, "rescale_lr": True}, {"lr": 0.5 * 50.0 * 0.25 / 100}):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        opt = IVON(model, num_data=100, init_precision=50.0, kl_warmup_steps=4, kl_warmup_init=0.25, **rate)
        for _ in range(6):
            regression_step(model, opt, x, y)
        trained.append(model.weight.detach())
    assert torch.equal(*trained)


def test_first_pass_without_noise_takes_the_gradient_s_magnitude(generator):
    """s₀ = M ĝ², and the second pass is noisy."""
    x, y = torch.randn(8, 3, generator=generator, dtype=F64), torch.randn(8, 1, generator=generator, dtype=F64)
    model = nn.Linear(3, 1, bias=False).double()
    opt = IVON(model, lr=0.0, num_data=100, rescale_lr=False)
    before = model.weight.detach().clone()
    with opt.sampled_params():
        assert torch.equal(model.weight, before)
        half_squares(model, x, y).backward()
    grad = (x * (x @ before.T - y)).mean(0, keepdim=True)
    opt.step()
    torch.testing.assert_close(opt.state[model.weight]["curvature"], 8 * grad**2)
    with torch.no_grad(), opt.sampled_params():
        assert not torch.equal(model.weight, before)


def test_a_rescaled_rate_without_the_natural_step_is_refused():
    with pytest.raises(HyperparameterError, match=r"rescale_lr=True .* natural step"):
        IVON(nn.Linear(2, 1), rescale_lr=True, init_precision=10.0, step_rule="trust_region")
