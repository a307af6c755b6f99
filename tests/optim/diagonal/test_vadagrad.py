"""VadaGrad against torch's AdaGrad, the natural gradient of its bound, and Vprop at the other end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on
from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import LinearSchedule, VadaGrad
from lightning_bayes.optim.diagonal import vprop
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.vadagrad import update

F64 = torch.float64


def vector(*values):
    return torch.tensor(values, dtype=F64)


def zeros(n):
    return torch.zeros(n, dtype=F64)


def test_without_noise_it_is_torch_s_adagrad(generator):
    """τ = 0, β₂ = 0; the initial accumulator is P₀/N, which is s₀ + δ̃ (algorithms E28): 120 steps."""
    x = torch.randn(60, 4, generator=generator, dtype=F64)
    y = torch.randn(60, generator=generator, dtype=F64)
    weights = nn.Parameter(torch.ones(4, dtype=F64))
    adagrad = torch.optim.Adagrad([weights], lr=0.1, initial_accumulator_value=0.3, eps=1e-8)
    state = MeanFieldState(torch.ones(4, dtype=F64), torch.full((4,), 0.3 - 0.05, dtype=F64), zeros(4))
    for t in range(120):
        rows = slice(t % 50, t % 50 + 8)
        weights.grad = x[rows].T @ (x[rows] @ weights.detach() - y[rows]) / 8
        adagrad.step()
        g = x[rows].T @ (x[rows] @ state.mean - y[rows]) / 8
        state = update(
            state,
            g,
            g**2,
            lr=0.1,
            betas=(0.0, 0.0),
            prior=0.0,
            full_prior=0.05,
            damping=1e-8,
            step=t + 1,
            temperature=0.0,
        )
        torch.testing.assert_close(state.mean, weights.detach(), rtol=1e-10, atol=1e-12)


def test_temperature_1_is_vprop(generator):
    mean, curvature, grad = (torch.rand(20, generator=generator, dtype=F64) for _ in range(3))
    start = MeanFieldState(mean, curvature, zeros(20))
    arguments = {"lr": 0.1, "betas": (0.9, 0.95), "prior": 0.05, "damping": 0.01, "step": 3}
    ours = update(start, grad, grad**2, temperature=1.0, full_prior=0.05, **arguments)
    for found, expected in zip(ours, vprop.update(start, grad, grad**2, **arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.5, 1.0])
def test_precision_takes_the_natural_gradient_step_of_the_bound(temperature):
    """P ← P + 2β ∂/∂Σ of E_q[Nf] + τ KL, by autograd, for f = ½hθ²; num_data and prior as elsewhere (P = Ns + δ)."""
    n, delta, h, beta, s = 50.0, 2.0, 0.7, 0.05, 0.3
    variance = (1 / vector(n * s + delta)).requires_grad_()
    kl = 0.5 * (delta * variance - 1 - (delta * variance).log())
    (gradient,) = torch.autograd.grad((0.5 * n * h * variance + temperature * kl).sum(), variance)
    expected = n * s + delta + 2 * beta * gradient
    start = MeanFieldState(zeros(1), vector(s), zeros(1))
    new = update(
        start,
        zeros(1),
        vector(h),
        lr=0.0,
        betas=(0.0, 1 - beta),
        prior=temperature * delta / n,
        full_prior=delta / n,
        temperature=temperature,
    )
    torch.testing.assert_close(n * new.curvature + delta, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_fixed_point_is_the_exact_tempered_posterior(temperature):
    """P = Nh/τ + δ, where the printed s + τδ̃ of eq. 23 would leave out (1-τ)δ (algorithms E6)."""
    n, delta, h = 50.0, 2.0, 0.7
    state = MeanFieldState(zeros(1), vector(0.1), zeros(1))
    for _ in range(3000):
        state = update(
            state,
            zeros(1),
            vector(h),
            lr=0.0,
            betas=(0.0, 0.9),
            prior=temperature * delta / n,
            full_prior=delta / n,
            temperature=temperature,
        )
    found = n * state.curvature + delta
    torch.testing.assert_close(found, vector(n * h / temperature + delta), rtol=1e-10, atol=0)
    printed = n * (state.curvature + temperature * delta / n)
    torch.testing.assert_close(found - printed, vector((1 - temperature) * delta), rtol=1e-8, atol=1e-10)


def regression(generator):
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    return x, x @ torch.randn(3, 1, generator=generator, dtype=F64)


def step(model, opt, x, y):
    train_on(opt, lambda: 0.5 * F.mse_loss(model(x), y))


def test_noise_never_grows(generator):
    """N = 1 as in the paper, and s₁ = 1e4."""
    x, y = regression(generator)
    model = nn.Linear(3, 1, bias=False).double()
    opt = VadaGrad(model, lr=0.01, num_data=1, prior_precision=1e-8, init_precision=1e4)
    precision = opt.posterior().precision["weight"]
    torch.testing.assert_close(precision, torch.full((1, 3), 1e4, dtype=F64))
    for _ in range(20):
        step(model, opt, x[:8], y[:8])
        new = opt.posterior().precision["weight"]
        assert (new >= precision).all()
        precision = new


def test_annealing_ends_in_optimization(generator):
    """From Vprop's posterior to a search distribution: the noise dies out and the mean finds the least squares."""
    x, y = regression(generator)
    model = nn.Linear(3, 1, bias=False).double()
    annealed = LinearSchedule(1.0, 0.0, steps=300)
    opt = VadaGrad(model, lr=0.1, betas=(0.0, 0.9), num_data=100, temperature=annealed, init_precision=100.0)
    precisions = []
    for t in range(1500):
        rows = slice(t % 32, t % 32 + 8)
        step(model, opt, x[rows], y[rows])
        precisions.append(float(opt.posterior().precision["weight"].mean()))
    assert opt.param_groups[0]["posterior"]["temperature"] == 0.0
    assert precisions[-1] >= max(precisions[300:]) * (1 - 1e-12)
    torch.testing.assert_close(model.weight.detach().T, torch.linalg.lstsq(x, y).solution, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_prior_counts_by_the_temperature_in_a_user_s_step_too(temperature, generator):
    """SGD around VadaGrad's first pass, which has no noise: g + τδ̃μ."""
    x, y = regression(generator)
    model = nn.Linear(3, 1, bias=False).double()
    before = model.weight.detach().clone()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model, VadaGrad(model, base=sgd, num_data=40, prior_precision=20.0, temperature=temperature), x[:8], y[:8])
    grad = (x[:8] * (x[:8] @ before.T - y[:8])).mean(0, keepdim=True)
    torch.testing.assert_close(model.weight.detach(), before - 1e-3 * (grad + temperature * 0.5 * before))


def test_a_kl_weight_beside_the_temperature_is_refused():
    model = nn.Linear(3, 1)
    with pytest.raises(HyperparameterError, match=r"VadaGrad has kl_weight=0\.5, but its temperature is the weight"):
        VadaGrad(model, kl_weight=0.5)
    with pytest.raises(HyperparameterError, match=r"kl_weight=0\.1 and kl_warmup_steps=10, .* pass temperature"):
        VadaGrad(model, kl_weight=0.1, kl_warmup_steps=10)
    with pytest.raises(HyperparameterError, match=r"kl_weight=0\.5"):
        VadaGrad(model, [{"params": model.parameters(), "kl_weight": 0.5}])
