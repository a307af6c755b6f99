"""Vprop against torch's RMSprop, the sums of the first paper, and the different fixed points of its two forms."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on, weights
from torch import nn

from lightning_bayes.optim import Vprop, Vprop0
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.vprop import update

F64 = torch.float64


def classification(generator, n=60):
    x = torch.randn(n, 4, generator=generator, dtype=F64)
    return x, (x[:, 0] + 0.5 * torch.randn(n, generator=generator, dtype=F64) > 0).long()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_vprop_0_is_torch_s_rmsprop(generator):
    """With a prior of 1e-300 and s₀ = 0; ε is the damping (algorithms E12)."""
    x, y = classification(generator)
    model, reference = network(), network()
    opt = Vprop0(
        model, lr=0.01, betas=(0.0, 0.95), num_data=60, prior_precision=1e-300, init_precision=1e-300, damping=1e-6
    )
    rmsprop = torch.optim.RMSprop(reference.parameters(), lr=0.01, alpha=0.95, eps=1e-6)
    for _ in range(150):
        rows = torch.randint(0, 60, (8,), generator=generator)
        with opt.sampled_params():
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
        rmsprop.zero_grad()
        F.cross_entropy(reference(x[rows]), y[rows]).backward()
        rmsprop.step()
        torch.testing.assert_close(weights(model), weights(reference), rtol=1e-9, atol=1e-11)


def test_vprop_0_with_a_prior_is_rmsprop_of_its_own_gradient(generator):
    """ε = λ̃; the prior's gradient is in the step and not in s: 100 steps written out."""
    x, y = classification(generator)
    model = nn.Linear(4, 1, bias=False).double()
    targets = y.to(F64)[:, None]
    opt = Vprop0(model, lr=0.02, betas=(0.0, 0.9), num_data=60, prior_precision=6.0, init_precision=6.0)
    w, s = model.weight.detach().clone(), torch.zeros(1, 4, dtype=F64)
    for t in range(100):
        rows = slice(t % 50, t % 50 + 10)
        with opt.sampled_params():
            F.binary_cross_entropy_with_logits(model(x[rows]), targets[rows]).backward()
        opt.step()
        g = ((torch.sigmoid(x[rows] @ w.T) - targets[rows]) * x[rows]).mean(0, keepdim=True)
        s = 0.9 * s + 0.1 * g**2
        w = w - 0.02 * (g + 0.1 * w) / (s.sqrt() + 0.1)
        torch.testing.assert_close(model.weight.detach(), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kl_weight", [1.0, 0.25])
def test_sum_form_is_the_first_paper_s_in_its_own_sums(kl_weight, generator):
    """s' ← (1-β)s' + βG², μ ← μ - β(G + λμ)/(s' + λ), σ⁻² = s' + λ, with G of the likelihood to the power 1/τ."""
    x = torch.randn(30, 3, generator=generator, dtype=F64)
    y = x @ torch.randn(3, 1, generator=generator, dtype=F64) + torch.randn(30, 1, generator=generator, dtype=F64)
    model = nn.Linear(3, 1, bias=False).double()
    prior, beta = 2.0, 0.02
    opt = Vprop(
        model,
        lr=beta,
        betas=(0.0, 1 - beta),
        scaling="sum",
        num_data=30,
        prior_precision=prior,
        kl_weight=kl_weight,
        init_precision=40.0,
    )
    mu, s = model.weight.detach().clone(), torch.full((1, 3), 40.0 - prior, dtype=F64)
    for _ in range(100):
        with opt.sampled_params():
            theta = model.weight.detach().clone()
            (0.5 * F.mse_loss(model(x), y)).backward()
        opt.step()
        g = (x * (x @ theta.T - y)).sum(0, keepdim=True) / kl_weight
        s = (1 - beta) * s + beta * g**2
        mu = mu - beta * (g + prior * mu) / (s + prior)
        torch.testing.assert_close(model.weight.detach(), mu, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(opt.posterior().precision["weight"], s + prior, rtol=1e-9, atol=0)
        mu = model.weight.detach().clone()


def test_sum_form_starts_from_the_first_batch_in_its_own_scale(generator):
    """s₀ = Ñ ĝ², like later measurements."""
    x, y = torch.randn(30, 3, generator=generator, dtype=F64), torch.zeros(30, 1, dtype=F64)
    model = nn.Linear(3, 1, bias=False).double()
    opt = Vprop(model, lr=0.0, scaling="sum", num_data=30)
    with opt.sampled_params():
        (0.5 * F.mse_loss(model(x), y)).backward()
    grad = (x * (x @ model.weight.detach().T)).mean(0, keepdim=True)
    opt.step()
    torch.testing.assert_close(opt.state[model.weight]["curvature"], 30 * grad**2)


# -- fixed points for linear regression with unit noise (algorithms E34) -------------------------------------------------


def orthogonal_regression(generator, n=40, d=3):
    """XᵀX = 4n·I, so that the exact posterior factorises and has the precision 4n + δ."""
    x = 2 * math.sqrt(n) * torch.linalg.qr(torch.randn(n, d, generator=generator, dtype=F64))[0]
    y = x @ torch.randn(d, 1, generator=generator, dtype=F64) + torch.randn(n, 1, generator=generator, dtype=F64)
    return x, y


def expected_square(x, y, mean, precision, rows):
    """E_q of the squared mean gradient of the examples `rows`, in closed form: squared mean plus variance."""
    inputs = x[rows]
    hessian = inputs.T @ inputs / len(inputs)
    at_mean = hessian @ mean - (inputs.T @ y[rows])[:, 0] / len(inputs)
    return at_mean**2 + (hessian**2 / precision).sum(1)


def posterior_mean(x, y, delta=1.0):
    return torch.linalg.solve(x.T @ x + delta * torch.eye(3, dtype=F64), x.T @ y)[:, 0]


def fixed_point(x, y, scaling, batches, delta=1.0):
    """Fixed point of the algorithm's own update with exact expectations."""
    n, mean = len(x), posterior_mean(x, y, delta)
    state = MeanFieldState(mean, torch.full((3,), 0.5, dtype=F64), torch.zeros(3, dtype=F64))
    for _ in range(300):
        precision = n * state.curvature + delta
        square = torch.stack([expected_square(x, y, mean, precision, rows) for rows in batches]).mean(0)
        measured = n * square if scaling == "sum" else square
        gradient = (x.T @ (x @ mean[:, None] - y))[:, 0] / n
        state = update(state, gradient, measured, lr=0.0, betas=(0.0, 0.95), prior=delta / n, scaling=scaling)
    return n * state.curvature + delta


def test_sum_form_with_all_data_finds_the_exact_precision(generator):
    """E_q[G²] = H² Σ = H if q is the posterior, up to the prior's contribution, here 1 of 161."""
    x, y = orthogonal_regression(generator)
    exact = (x.T @ x).diagonal() + 1
    torch.testing.assert_close(fixed_point(x, y, "sum", [range(40)]), exact, rtol=0.02, atol=0)


def test_sum_form_with_minibatches_is_too_precise(generator):
    """By about N/M, 40 and 8, times the data's own scatter about the fit (which is about 1) and that of eight batches."""
    x, y = orthogonal_regression(generator)
    ratios = {size: fixed_point(x, y, "sum", torch.arange(40).split(size)).mean() / (4 * 40 + 1) for size in (40, 5, 1)}
    assert ratios[40] < 1.02
    assert 2 < ratios[5] < 30
    assert 10 < ratios[1] < 100


def test_mean_form_is_about_right_for_single_examples_and_far_too_wide_for_all_data(generator):
    """All data: P = δ + H²/(N P), about H/√N, whatever the noise of the data."""
    x, y = orthogonal_regression(generator)
    exact = 4 * 40 + 1
    single = fixed_point(x, y, "mean", torch.arange(40).split(1)).mean() / exact
    few = fixed_point(x, y, "mean", torch.arange(40).split(5)).mean() / exact
    assert 0.5 < single < 2
    assert 0.5 * single / 5 < few < 2.5 * single / 5
    everything = fixed_point(x, y, "mean", [range(40)])
    torch.testing.assert_close(everything, torch.full((3,), 160 / math.sqrt(40), dtype=F64), rtol=0.05, atol=0)


def test_sum_form_warns_of_minibatches_once(generator):
    x, y = classification(generator)
    model = network()
    opt = Vprop(model, scaling="sum", num_data=60, init_precision=100.0)

    def train():
        train_on(opt, lambda: F.cross_entropy(model(x[:15]), y[:15]), 3)

    with pytest.warns(UserWarning, match=r"all 60 examples in one batch; with 15 .* about 4 times too large") as caught:
        train()
    assert len(caught) == 1
