"""Full-covariance noisy natural gradient against the exact posterior of linear regression."""

from __future__ import annotations

import pytest
import torch
from random_matrices import F64, normal, seeded, spd

from lightning_bayes.errors import NotPositiveDefiniteError
from lightning_bayes.optim.dense.full_gaussian import FullState, sample, update
from lightning_bayes.optim.dense.measurements import outer_products

N, DELTA, NOISE_PRECISION = 40, 2.0, 4.0


@pytest.fixture
def data():
    generator = seeded(0)
    x = normal(N, 3, generator=generator)
    return x, x @ normal(3, generator=generator) + 0.5 * normal(N, generator=generator)


def exact(x, y, tau=1.0):
    """Of the tempered posterior: precision (N/τ) h + δ and its mean."""
    precision = NOISE_PRECISION / tau * x.T @ x + DELTA * torch.eye(3, dtype=F64)
    return torch.linalg.solve(precision, NOISE_PRECISION / tau * x.T @ y), precision


def start(seed=1):
    generator = seeded(seed)
    return FullState(normal(3, generator=generator), spd(3, generator=generator), torch.zeros(3, dtype=F64))


def covariance(state, **arguments):
    basis = torch.eye(3, dtype=F64)
    root = torch.stack([sample(state, e, **arguments) - state.mean for e in basis], 1)
    return root @ root.T


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_one_step_of_von_is_the_exact_posterior(data, tau):
    """E1, E6: β₂ = 0, α = 1, the gradient at μ, any start and any KL weight."""
    x, y = data
    state, prior = start(), tau * DELTA / N
    grad = NOISE_PRECISION * x.T @ (x @ state.mean - y) / N
    new = update(state, grad, NOISE_PRECISION * x.T @ x / N, lr=1.0, betas=(0.0, 0.0), prior=prior)
    mean, precision = exact(x, y, tau)
    torch.testing.assert_close(new.mean, mean)
    found = covariance(new, num_data=N, prior=prior, kl_weight=tau)
    torch.testing.assert_close(found, torch.linalg.inv(precision))


def test_von_with_noise_converges_to_the_exact_posterior(data, generator):
    x, y = data
    state, prior, sums = start(), DELTA / N, torch.zeros(3, dtype=F64)
    for step in range(2000):
        theta = sample(state, normal(3, generator=generator), num_data=N, prior=prior)
        grad = NOISE_PRECISION * x.T @ (x @ theta - y) / N
        state = update(state, grad, NOISE_PRECISION * x.T @ x / N, lr=0.1, betas=(0.0, 0.9), prior=prior)
        sums += state.mean if step >= 1000 else 0
    mean, precision = exact(x, y)
    torch.testing.assert_close(covariance(state, num_data=N, prior=prior), torch.linalg.inv(precision))
    # The mean moves by α times a draw of the posterior: an average over 1000 correlated steps has about Σ/1000.
    error = (torch.linalg.inv(precision).diagonal() / 1000).sqrt()
    assert ((sums / 1000 - mean) / error).abs().max() < 4


def test_the_true_fisher_with_sampled_labels_has_the_exact_precision(data):
    """E4, NNG-full: labels ŷ = f ± σ have E[(f - ŷ)²] = 1/β, so the scores' outer products are the Fisher."""
    x, y = data
    residuals = torch.where(torch.arange(N) % 2 == 0, 1.0, -1.0).to(F64) / NOISE_PRECISION**0.5
    scores = NOISE_PRECISION * residuals[:, None] * x
    state, prior = start(), DELTA / N
    grad = NOISE_PRECISION * x.T @ (x @ state.mean - y) / N
    new = update(state, grad, outer_products(scores), lr=1.0, betas=(0.0, 0.0), prior=prior)
    mean, precision = exact(x, y)
    torch.testing.assert_close(new.mean, mean)
    torch.testing.assert_close(covariance(new, num_data=N, prior=prior), torch.linalg.inv(precision))


def test_the_empirical_fisher_does_not(data):
    """E3: VONG's fixed point is δ I + Σ_i E_q[g_i g_iᵀ], not the exact precision."""
    x, y = data
    mean, precision = exact(x, y)
    grads = NOISE_PRECISION * (x @ mean - y)[:, None] * x
    found = N * outer_products(grads) + DELTA * torch.eye(3, dtype=F64)
    torch.testing.assert_close(outer_products(grads), sum(torch.outer(g, g) for g in grads) / N)
    assert ((found - precision) / precision.diagonal().mean()).abs().max() > 0.1


def test_damping_is_in_the_step_and_where_asked_in_the_noise():
    state, grad = start(), normal(3, generator=seeded(2))
    eye, kept = torch.eye(3, dtype=F64), state.curvature
    new = update(state, grad, kept, lr=0.5, betas=(0.0, 0.9), prior=0.02, damping=0.3)
    torch.testing.assert_close(
        new.mean, state.mean - 0.5 * torch.linalg.solve(kept + 0.32 * eye, grad + 0.02 * state.mean)
    )
    inside = covariance(state, num_data=N, prior=0.02, damping=0.3)
    torch.testing.assert_close(inside, torch.linalg.inv(kept + 0.32 * eye) / N)
    torch.testing.assert_close(covariance(state, num_data=N, prior=0.02), torch.linalg.inv(kept + 0.02 * eye) / N)


def test_momentum_is_a_corrected_average():
    at, total = start(), torch.zeros(3, dtype=F64)
    for step in range(1, 4):
        grad = normal(3, generator=seeded(step))
        total = 0.9 * total + 0.1 * (grad + 0.02 * at.mean)
        move = torch.linalg.solve(at.curvature + 0.02 * torch.eye(3, dtype=F64), total / (1 - 0.9**step))
        expected = at.mean - 0.1 * move
        at = update(at, grad, at.curvature, lr=0.1, betas=(0.9, 0.5), prior=0.02, step=step)
        torch.testing.assert_close(at.mean, expected)


def test_leading_dimensions_are_independent_models():
    states = [start(seed) for seed in (1, 2)]
    together = FullState(*map(torch.stack, zip(*states, strict=True)))
    grads, curvature = normal(2, 3, generator=seeded(3)), spd(3, 2, generator=seeded(4))
    arguments = {"lr": 0.1, "betas": (0.9, 0.5), "prior": 0.02}
    batched = update(together, grads, curvature, **arguments)
    for i, state in enumerate(states):
        alone = update(state, grads[i], curvature[i], **arguments)
        for found, truth in zip(batched, alone, strict=True):
            torch.testing.assert_close(found[i], truth)


def test_a_hessian_with_large_negative_curvature_asks_for_damping():
    with pytest.raises(NotPositiveDefiniteError, match=r"curvature with prior and damping \[3, 3\].*larger damping"):
        update(start(), torch.zeros(3, dtype=F64), -9 * torch.eye(3, dtype=F64), lr=0.1, betas=(0.0, 0.0), prior=0.1)
