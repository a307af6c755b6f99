"""VON against closed forms, quadrature with L-BFGS, autograd's Hessian and the bounds of the module's docstring."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from mean_field_logistic import LogisticRegression
from optimizer_family import train_on
from torch import nn

from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.optim import VON, ReparameterisedVON
from lightning_bayes.optim.diagonal import vogn
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.von import moved_curvature, update
from lightning_bayes.posteriors import precision

F64 = torch.float64
POSITIVITY = ["backtracking", "correction"]


def state(mean, curvature):
    return MeanFieldState(torch.as_tensor(mean), torch.as_tensor(curvature), torch.zeros_like(torch.as_tensor(mean)))


def test_pure_update_is_the_paper_line_by_line():
    """Khan et al. 2018 eqs. 7-8 with numbers by hand: β = α = 0.5, λ̃ = 0.1."""
    new = update(state([2.0], [1.0]), torch.tensor([0.6]), torch.tensor([3.0]), lr=0.5, betas=(0.0, 0.5), prior=0.1)
    assert new.curvature.item() == pytest.approx(0.5 * 1 + 0.5 * 3)
    assert new.mean.item() == pytest.approx(2 - 0.5 * (0.6 + 0.1 * 2) / (2 + 0.1))


def linear_regression(generator, n=40, d=3):
    x = torch.randn(n, d, generator=generator, dtype=F64)
    x[:, 1] += 0.5 * x[:, 0]
    return x, x @ torch.randn(d, 1, generator=generator, dtype=F64) + 0.3 * torch.randn(
        n, 1, generator=generator, dtype=F64
    )


def exact_regression(x, y, delta, noise_precision=2.0):
    """Posterior mean, and the diagonal of its precision, the mean-field optimum (algorithms E2)."""
    full = noise_precision * x.T @ x + delta * torch.eye(x.shape[1], dtype=F64)
    return torch.linalg.solve(full, noise_precision * x.T @ y)[:, 0], full.diagonal()


def test_linear_regression_has_the_exact_mean_and_the_optimal_precision(generator):
    """With the exact expectations, which for a quadratic are its values at the mean."""
    x, y = linear_regression(generator)
    delta, n = 2.0, len(x)
    found = state(torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64))
    for _ in range(400):
        grad = (2 * x * (x @ found.mean[:, None] - y)).mean(0)
        found = update(found, grad, 2 * x.square().mean(0), lr=0.5, betas=(0.0, 0.5), prior=delta / n)
    mean, diagonal = exact_regression(x, y, delta)
    torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        precision(found.curvature, num_data=n, prior_precision=delta), diagonal, rtol=1e-10, atol=0
    )


def steps(opt, model, x, y, count):
    for _ in range(count):
        train_on(opt, lambda: F.mse_loss(model(x), y))
        yield model.weight.detach()[0].clone()


def test_optimizer_reaches_the_same_posterior_from_samples(generator):
    x, y = linear_regression(generator)
    model = nn.Linear(3, 1, bias=False).double()
    opt = VON(model, lr=0.1, betas=(0.0, 0.9), num_data=len(x), prior_precision=2.0)
    means = torch.stack(list(steps(opt, model, x, y, 1200)))[200:].mean(0)
    mean, diagonal = exact_regression(x, y, 2.0)
    torch.testing.assert_close(opt.posterior().precision["weight"][0], diagonal, rtol=1e-10, atol=0)
    # A random walk around the mean, √(lr/2) posterior deviations wide and nearly independent after 1/lr steps.
    error = math.sqrt(0.1 / 2) / math.sqrt(1000 * 0.1 / 2)
    assert ((means - mean) * diagonal.sqrt() / error).abs().max() < 4


@pytest.mark.parametrize("positivity", POSITIVITY)
def test_reparameterised_hessian_reaches_it_too(positivity, generator):
    x, y = linear_regression(generator)
    model = nn.Linear(3, 1, bias=False).double()
    opt = ReparameterisedVON(
        model,
        lr=0.02,
        betas=(0.0, 0.998),
        num_data=len(x),
        prior_precision=2.0,
        init_precision=100.0,
        positivity=positivity,
    )
    late = [
        opt.posterior().precision["weight"][0]
        for t, _ in enumerate(steps(opt, model, x, y, 3000))
        if t >= 1000 and t % 10 == 0
    ]
    torch.testing.assert_close(torch.stack(late).mean(0), exact_regression(x, y, 2.0)[1], rtol=0.1, atol=0)


def by_quadrature(problem, kl_weight=1.0, num_data=None, rate=0.3, measure=1, pure=update):
    """The fixed point with exact expectations; `measure` 1 is the Hessian, 2 the squared gradients."""
    n = num_data or len(problem)
    found = state(torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64))
    for _ in range(400):
        width = precision(found.curvature, num_data=n, prior_precision=problem.prior_precision, kl_weight=kl_weight)
        measured = problem.expectations(found.mean, width)
        prior = kl_weight * problem.prior_precision / n
        found = pure(found, measured[0], measured[measure], lr=rate, betas=(0.0, 1 - rate), prior=prior)
    return found.mean, precision(
        found.curvature, num_data=n, prior_precision=problem.prior_precision, kl_weight=kl_weight
    )


@pytest.mark.parametrize("kl_weight", [0.1, 0.5, 1.0])
def test_quadrature_lands_on_the_optimum_of_the_tempered_bound(kl_weight, generator):
    """Algorithms E5, E6: the optimum of E_q[Nf] + τ KL by L-BFGS on an independent implementation of the bound."""
    problem = LogisticRegression(generator)
    mean, width = by_quadrature(problem, kl_weight)
    expected_mean, expected_width = problem.optimum(kl_weight)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(width, expected_width, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kl_weight", [0.1, 0.5, 1.0])
def test_the_printed_tempered_form_is_exact_without_tempering_only(kl_weight):
    """Khan et al. eqs. 23-24 and Osawa's Algorithm 1: s ← (1-τβ)s + βh, 1/Σ = N(s + τδ/N). It lacks (1-τ)δ."""
    n, delta, h, s = 50, 2.0, 1.2634, 0.0
    for _ in range(2000):
        s = (1 - kl_weight * 0.1) * s + 0.1 * h
    exact = n * h / kl_weight + delta  # where the derivative of n h σ²/2 + τ(δσ² - log σ²)/2 vanishes
    ours = state([0.0], [0.0])
    for _ in range(2000):
        ours = update(ours, torch.zeros(1), torch.tensor([h]), lr=0.1, betas=(0.0, 0.9), prior=kl_weight * delta / n)
    found = precision(ours.curvature.double(), num_data=n, prior_precision=delta, kl_weight=kl_weight)
    assert found.item() == pytest.approx(exact, rel=1e-5)
    assert exact - n * (s + kl_weight * delta / n) == pytest.approx((1 - kl_weight) * delta)


def test_data_augmentation_factor_equals_replicated_data(generator):
    """Algorithms E7: ρ = 3 on N examples against ρ = 1 on each example three times."""
    problem = LogisticRegression(generator)
    counted = by_quadrature(problem, num_data=3 * len(problem))
    problem.x, problem.y = problem.x.repeat(3, 1), problem.y.repeat(3)
    replicated = problem.optimum()
    for found, expected in zip(counted, replicated, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_squared_gradients_lead_elsewhere(generator):
    """Algorithms E3: VOGN's fixed point is δ + Σ_i E_q[g_i²], which is not the optimum of the bound."""
    problem = LogisticRegression(generator)
    mean, width = by_quadrature(problem, measure=2, pure=vogn.update)
    fixed_point = problem.prior_precision + len(problem) * problem.expectations(mean, width)[2]
    torch.testing.assert_close(width, fixed_point, rtol=1e-8, atol=0)
    optimal_mean, optimal_width = problem.optimum()
    assert (width / optimal_width - 1).abs().max() > 0.02
    worse = problem.negative_bound(mean, -0.5 * width.log()) - problem.negative_bound(
        optimal_mean, -0.5 * optimal_width.log()
    )
    assert worse > 1e-4


@pytest.mark.parametrize("positivity", POSITIVITY)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_negative_hessian_halves_the_precision_at_most(positivity, dtype, generator):
    """Algorithms E30, for 20 000 random (s, ĥ) over twelve orders of magnitude and both signs."""

    def spread(size):
        sign = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        return (sign * 10 ** (12 * torch.rand(size, generator=generator, dtype=F64) - 6)).to(dtype)

    prior = 1e-3
    for rate in (1e-3, 0.5, 1.0):
        hessian, curvature = spread(20_000), (spread(20_000).abs() - prior).to(dtype)
        before = curvature + prior
        after = moved_curvature(curvature, hessian, rate, prior, positivity) + prior
        is_above_least = before > 4e-3 * prior  # below, the minimum precision applies
        assert (after > 0).all()
        is_bounded = is_above_least & ((hessian < 0) | (positivity == "correction"))
        assert (after[is_bounded] >= 0.499 * before[is_bounded]).all()


@pytest.mark.parametrize("positivity", POSITIVITY)
def test_many_negative_curvatures_never_break_it(positivity):
    curvature = torch.tensor([1.0, 1e-3, -0.5e-3])
    for _ in range(200):
        curvature = moved_curvature(curvature, torch.full((3,), -1e3), 0.5, 1e-3, positivity)
    assert (curvature + 1e-3 > 0.9e-6).all()


def test_back_tracking_leaves_allowed_moves_alone():
    curvature, hessian = torch.tensor([1.0, 1.0, -0.05]), torch.tensor([5.0, -0.9, 3.0])
    moved = moved_curvature(curvature, hessian, 0.25, 0.1, "backtracking")
    torch.testing.assert_close(moved, curvature + 0.25 * (hessian - curvature))


def test_the_printed_bound_of_the_back_tracking_does_not_suffice():
    """App. D.1 eq. 63 bounds β by δ s/|ĥ|, for s + βĥ; (1-β)s + βĥ is negative under it."""
    s, h, prior = 1.0, -1.5, 0.0001
    printed = min(0.9, 0.9 * s / abs(h))
    assert (1 - printed) * s + printed * h < -prior
    assert moved_curvature(torch.tensor([s]), torch.tensor([h]), 0.9, prior, "backtracking") > 0


def test_correction_is_of_second_order_in_the_rate():
    """The mean over symmetric noise of ĥ: backtracking is biased by the bound, the correction by ½ β² var / (s + δ̃)."""
    curvature, noise = torch.full((2,), 1.0, dtype=F64), torch.tensor([-50.0, 50.0], dtype=F64)
    for rate in (1e-2, 1e-3):
        moved = moved_curvature(curvature, 1 + noise, rate, 0.1, "correction")
        assert moved.mean().item() - 1 == pytest.approx(0.5 * rate**2 * 2500 / 1.1, rel=1e-6)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def diagonal_of_hessian(model, x, y):
    def loss(flat):
        parts = torch.split(flat, [p.numel() for p in model.parameters()])
        named = {n: v.view(p.shape) for (n, p), v in zip(model.named_parameters(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, named, (x,)), y)

    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return torch.autograd.functional.hessian(loss, flat).diagonal()


def test_measures_the_exact_diagonal_also_where_it_is_negative(generator):
    model, x = small_net(), torch.randn(8, 3, generator=generator, dtype=F64)
    y = torch.arange(8) % 2
    opt = VON(model, num_data=8)
    with opt.sampled_params():  # the first pass has no noise
        F.cross_entropy(model(x), y).backward()
    diagonal = diagonal_of_hessian(model, x, y)
    assert diagonal.min() < 0
    torch.testing.assert_close(torch.cat([m.flatten() for m in opt.collect()[0][-4:]]), diagonal)


@pytest.mark.parametrize("positivity", POSITIVITY)
@pytest.mark.parametrize("optimizer", [VON, ReparameterisedVON])
def test_posterior_is_one_throughout_on_a_model_with_negative_curvature(optimizer, positivity, generator):
    model, x = small_net(), torch.randn(16, 3, generator=generator, dtype=F64)
    y = torch.arange(16) % 2
    opt = optimizer(model, lr=0.05, betas=(0.9, 0.5), num_data=16, prior_precision=0.1, positivity=positivity)
    saw_negative = False
    for _ in range(50):
        with opt.sampled_params():
            F.cross_entropy(model(x), y).backward()
        saw_negative |= any((h < 0).any() for h in opt.collect()[0][-4:])
        opt.step()
        assert all((p > 0).all() for p in opt.posterior().precision.values())
    assert saw_negative


def test_a_model_without_hessian_is_refused_by_name_before_the_first_step(generator):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    before = [p.detach().clone() for p in model.parameters()]
    opt = VON(model, num_data=8)
    with (
        pytest.raises(UnsupportedLayerError, match=r"no rule of diag_hessian for 1 \(LayerNorm\)"),
        opt.sampled_params(),
    ):
        F.cross_entropy(model(torch.randn(8, 3, generator=generator)), torch.arange(8) % 2).backward()
    assert opt.num_updates == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
