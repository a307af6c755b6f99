"""Bayes by Backprop against autograd on the bound, torch's Adam, and the optimum by L-BFGS."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mean_field_logistic import LogisticRegression
from optimizer_family import train_on
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_bayes.optim import BBB
from lightning_bayes.optim.diagonal.bbb import BBBState, pathwise_gradients, update
from lightning_bayes.posteriors import precision

F64 = torch.float64
N, DELTA, TAU = 60, 2.0, 0.5
PRIOR = TAU * DELTA / N


def start(mean, std):
    zeros = torch.zeros_like(mean)
    return BBBState(mean, TAU / N / std.square() - PRIOR, zeros, zeros, zeros, zeros)


def std_of(state):
    return precision(state.curvature, num_data=N, prior_precision=DELTA, kl_weight=TAU).rsqrt()


def bound(problem, mean, log_std, noise):
    """F = mean_k f(μ + σ ε_k) + (τ/N) KL, per example."""
    logits = problem.x @ (mean + log_std.exp() * noise).T
    nll = F.binary_cross_entropy_with_logits(logits, problem.y[:, None].expand_as(logits))
    kl = kl_divergence(Normal(mean, log_std.exp()), Normal(0.0, torch.tensor(DELTA, dtype=F64).rsqrt())).sum()
    return nll + TAU / N * kl


def measured(problem, mean, std, noise):
    """ĝ and ĝ ε / σ, averaged over the samples."""
    residual = (problem.x @ (mean + std * noise).T).sigmoid() - problem.y[:, None]
    grads = residual.T @ problem.x / len(problem)
    return grads.mean(0), (grads * noise / std).mean(0)


def test_pathwise_gradients_are_autograds(generator):
    """Algorithms E31, with the KL of torch.distributions, for one σ below and one above the prior's."""
    problem = LogisticRegression(generator, n=N)
    noise = torch.randn(5, 3, generator=generator, dtype=F64)
    for std in (0.2, 1.5):
        mean = torch.randn(3, generator=generator, dtype=F64).requires_grad_()
        log_std = torch.full((3,), std, dtype=F64).log().requires_grad_()
        expected = torch.autograd.grad(bound(problem, mean, log_std, noise), [mean, log_std])
        state = start(mean.detach(), log_std.detach().exp())
        assert (state.curvature < 0).all() == (std > DELTA**-0.5)
        grad, hessian = measured(problem, mean.detach(), log_std.detach().exp(), noise)
        of_mean, of_log_std = pathwise_gradients(state, grad, hessian, PRIOR)
        torch.testing.assert_close(of_mean, expected[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(TAU / N * of_log_std, expected[1], rtol=1e-10, atol=1e-14)


def test_is_torchs_adam_on_mean_and_log_std(generator):
    """100 steps with the same noise; the gradient of log σ is multiplied by N/τ to match the scale of Adam's ε."""
    problem = LogisticRegression(generator, n=N)
    state = start(torch.zeros(3, dtype=F64), torch.full((3,), 0.3, dtype=F64))
    mean = torch.zeros(3, dtype=F64, requires_grad=True)
    log_std = torch.full((3,), 0.3, dtype=F64).log().requires_grad_()
    adam = torch.optim.Adam([{"params": [mean], "lr": 0.02}, {"params": [log_std], "lr": 0.01}], betas=(0.9, 0.99))
    for t in range(1, 101):
        noise = torch.randn(2, 3, generator=generator, dtype=F64)
        grad, hessian = measured(problem, state.mean, std_of(state), noise)
        state = update(state, grad, hessian, lr=0.02, betas=(0.9, 0.99), prior=PRIOR, step=t, std_lr=0.01)
        mean.grad, log_std.grad = torch.autograd.grad(bound(problem, mean, log_std, noise), [mean, log_std])
        log_std.grad *= N / TAU
        adam.step()
        torch.testing.assert_close(state.mean, mean.detach(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(std_of(state), log_std.detach().exp(), rtol=1e-8, atol=0)


def test_quadrature_lands_on_the_optimum_of_the_bound(generator):
    """Algorithms E31: with a decaying learning rate, Adam finds the optimum of VON and L-BFGS."""
    problem = LogisticRegression(generator, n=N, prior_precision=DELTA)
    state = start(torch.zeros(3, dtype=F64), torch.full((3,), 0.5, dtype=F64))
    for t in range(1, 1501):
        grad, hessian, _ = problem.expectations(state.mean, std_of(state) ** -2)
        state = update(state, grad, hessian, lr=0.1 * 0.99 ** (t - 1), betas=(0.9, 0.99), prior=PRIOR, step=t)
    mean, optimal = problem.optimum(TAU)
    torch.testing.assert_close(state.mean, mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(std_of(state) ** -2, optimal, rtol=1e-4, atol=0)


def test_posterior_may_be_wider_than_the_prior():
    """A negative curvature h > -δ̃ has the optimum 1/σ² = (N/τ)h + δ < δ, where s = h."""
    state = start(torch.zeros(1, dtype=F64), torch.full((1,), 0.5, dtype=F64))
    h = torch.full((1,), -0.6 * PRIOR, dtype=F64)
    for t in range(1, 1001):
        state = update(
            state, torch.zeros(1, dtype=F64), h, lr=0.1 * 0.99 ** (t - 1), betas=(0.9, 0.99), prior=PRIOR, step=t
        )
    torch.testing.assert_close(state.curvature, h, rtol=1e-4, atol=0)
    assert std_of(state) > DELTA**-0.5


def test_optimizer_reaches_the_optimum_from_samples(generator):
    problem = LogisticRegression(generator, n=N, prior_precision=DELTA)
    model = nn.Linear(3, 1, bias=False).double()
    opt = BBB(
        model,
        lr=lambda t: 0.03 / (1 + t / 200),
        num_data=N,
        prior_precision=DELTA,
        init_precision=10.0,
        betas=(0.9, 0.99),
    )
    late = []
    for t in range(2000):
        train_on(opt, lambda: F.binary_cross_entropy_with_logits(model(problem.x)[:, 0], problem.y))
        if t >= 500 and t % 10 == 0:
            late.append((opt.posterior().mean["weight"][0], opt.posterior().precision["weight"][0].log()))
    mean, optimal = problem.optimum()
    means, log_precisions = (torch.stack(values).mean(0) for values in zip(*late, strict=True))
    assert ((means - mean) * optimal.sqrt()).abs().max() < 0.15
    assert (log_precisions - optimal.log()).abs().max() < 0.15


def test_own_learning_rate_of_the_std():
    """Adam's first step is as long as its learning rate."""
    state = start(torch.ones(2, dtype=F64), torch.full((2,), 0.3, dtype=F64))
    grad, hessian = torch.tensor([1.0, -1.0], dtype=F64), torch.tensor([50.0, -50.0], dtype=F64)
    new = update(state, grad, hessian, lr=0.1, betas=(0.9, 0.99), prior=PRIOR, std_lr=0.02)
    torch.testing.assert_close(new.mean - 1, torch.tensor([-0.1, 0.1], dtype=F64))
    torch.testing.assert_close((std_of(new) / 0.3).log(), torch.tensor([-0.02, 0.02], dtype=F64))
