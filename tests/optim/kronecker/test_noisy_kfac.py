"""Noisy K-FAC's pure functions: the covariance of its noise, conjugate regression, old factors, two intervals."""

from __future__ import annotations

import pytest
import torch
from random_matrices import F64, dense_damped, normal, seeded, spd
from torch import nn

from lightning_bayes.curvature.factors import input_factor
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.dense import full_gaussian
from lightning_bayes.optim.kronecker import kfac, noisy_kfac
from lightning_bayes.posteriors import kronecker_precision

N, TAU, DELTA = 50.0, 0.3, 2.0
PRIOR = TAU * DELTA / N  # δ̃
NOISE = {"num_data": N, "kl_weight": TAU}


def state(seed=0, damping=0.1, damping_in_noise=False):
    generator = seeded(seed)
    curvature = KroneckerProduct(spd(2, generator=generator), spd(3, generator=generator))
    mean = normal(2, 3, generator=generator)
    return noisy_kfac.initial_state(mean, curvature, prior=PRIOR, damping=damping, damping_in_noise=damping_in_noise)


@pytest.mark.parametrize("in_noise", [False, True])
def test_the_noise_has_the_papers_covariance(in_noise):
    """E17: T Tᵀ = (τ/Ñ) (S^γ)⁻¹ ⊗ (A^γ)⁻¹ with S and A of different size and not diagonal; γ inside or outside."""
    at = state(damping_in_noise=in_noise)
    basis = torch.eye(6, dtype=F64).view(6, 2, 3)
    root = torch.stack([(noisy_kfac.sample(at, e, **NOISE) - at.layer.mean).flatten() for e in basis], 1)
    dense = dense_damped(at.layer.curvature, PRIOR + (0.1 if in_noise else 0.0))
    torch.testing.assert_close(root @ root.T, TAU / N * torch.linalg.inv(dense))


def test_samples_have_that_covariance(generator):
    at = state()
    noise = normal(20000, 2, 3, generator=generator)
    draws = noisy_kfac.sample(at, noise, **NOISE).flatten(1)
    truth = TAU / N * torch.linalg.inv(dense_damped(at.layer.curvature, PRIOR))
    variance = truth.diagonal()
    error = ((variance[:, None] * variance + truth.square()) / len(draws)).sqrt()
    assert ((torch.cov(draws.T) - truth) / error).abs().max() < 4.2


@pytest.mark.parametrize("in_noise", [False, True])
def test_the_preconditioner_has_both_dampings(in_noise):
    at, grad = state(damping_in_noise=in_noise), normal(2, 3, generator=seeded(7))
    (new,) = noisy_kfac.update([at], [grad], lr=1.0, prior=PRIOR)
    step = torch.linalg.solve(dense_damped(at.layer.curvature, PRIOR + 0.1), (grad + PRIOR * at.layer.mean).flatten())
    torch.testing.assert_close((at.layer.mean - new.layer.mean).flatten(), step)


def test_the_posterior_of_checkpoints_is_the_one_sampled_from():
    at = state()
    precision = kronecker_precision(at.layer.curvature, num_data=N, prior_precision=DELTA, kl_weight=TAU)
    root = at.root.dense() * (TAU / N) ** 0.5
    torch.testing.assert_close(torch.linalg.inv(root @ root.T), precision.dense())


def test_the_prior_is_taken_at_the_mean_or_at_the_sample():
    at, grad = state(), torch.zeros(2, 3, dtype=F64)
    sample = noisy_kfac.sample(at, normal(2, 3, generator=seeded(3)), **NOISE)
    (mean,) = noisy_kfac.update([at], [grad], lr=1.0, prior=PRIOR)
    (there,) = noisy_kfac.update([at], [grad], lr=1.0, prior=PRIOR, samples=[sample])
    torch.testing.assert_close(mean.layer.mean, at.layer.mean - at.layer.inverse.matvec(PRIOR * at.layer.mean))
    torch.testing.assert_close(there.layer.mean, at.layer.mean - at.layer.inverse.matvec(PRIOR * sample))


def test_noise_comes_from_the_old_factors_until_the_next_inversion():
    old, noise = state(), normal(2, 3, generator=seeded(5))
    measured = {"output_factor": spd(2, generator=seeded(8)), "input_factor": spd(3, generator=seeded(9))}
    averaged = noisy_kfac.average_factors(old, beta=0.5, **measured)
    assert torch.equal(noisy_kfac.sample(averaged, noise, **NOISE), noisy_kfac.sample(old, noise, **NOISE))
    torch.testing.assert_close(
        averaged.layer.curvature.left, (old.layer.curvature.left + measured["output_factor"]) / 2
    )
    fresh = noisy_kfac.refresh(averaged, prior=PRIOR, damping=0.1)
    expected = noisy_kfac.initial_state(averaged.layer.mean, averaged.layer.curvature, prior=PRIOR, damping=0.1)
    torch.testing.assert_close(fresh.root, expected.root)
    torch.testing.assert_close(fresh.layer.inverse, expected.layer.inverse)
    assert not torch.allclose(fresh.root.left, old.root.left)


def test_inverting_keeps_mean_momentum_and_factors():
    (at,) = noisy_kfac.update([state()], [torch.ones(2, 3, dtype=F64)], lr=0.1, beta=0.9, prior=PRIOR)
    fresh = noisy_kfac.refresh(at, prior=PRIOR, damping=0.1)
    assert fresh.layer.mean is at.layer.mean
    assert fresh.layer.momentum is at.layer.momentum
    assert fresh.layer.curvature is at.layer.curvature


# -- conjugate linear regression: y = W x + noise of precision β, S = β I known, A the data's second moment ----------------


def regression(outputs, seed=0):
    generator = seeded(seed)
    x = normal(30, 2, generator=generator)
    rows = torch.cat([x, torch.ones(30, 1, dtype=F64)], 1)
    y = rows @ normal(3, outputs, generator=generator) + 0.5 * normal(30, outputs, generator=generator)
    return rows, y, input_factor(nn.Linear(2, outputs), x)


def test_without_prior_noisy_kfac_reaches_the_exact_likelihood_in_one_step():
    """The Fisher of linear regression is β I ⊗ A: with δ̃ → 0 the factorisation is exact, and so is the natural step."""
    rows, y, moment = regression(2)
    curvature = KroneckerProduct(4 * torch.eye(2, dtype=F64), moment)
    start = noisy_kfac.initial_state(torch.zeros(2, 3, dtype=F64), curvature, prior=1e-14)
    grad = 4 * (start.layer.mean @ rows.T - y.T) @ rows / 30
    (new,) = noisy_kfac.update([start], [grad], lr=1.0, prior=1e-14)
    torch.testing.assert_close(new.layer.mean.T, torch.linalg.lstsq(rows, y).solution, rtol=1e-6, atol=1e-6)
    covariance = start.root.dense() @ start.root.dense().T / 30
    exact = torch.kron(torch.eye(2, dtype=F64), torch.linalg.inv(4 * rows.T @ rows).contiguous())
    torch.testing.assert_close(covariance, exact, rtol=1e-6, atol=1e-6)


def test_noisy_kfac_equals_full_nng_where_the_factorisation_is_exact():
    """Without a prior π-damping adds no cross terms, so noise and path are the same up to rounding."""
    rows, y, moment = regression(2, seed=4)
    left = 4 * torch.eye(2, dtype=F64)
    kron = noisy_kfac.initial_state(torch.zeros(2, 3, dtype=F64), KroneckerProduct(left, moment), prior=1e-14)
    full = full_gaussian.FullState(torch.zeros(6, dtype=F64), torch.kron(left, moment), torch.zeros(6, dtype=F64))
    for step in range(1, 4):
        noise = normal(2, 3, generator=seeded(step))
        basis = torch.eye(6, dtype=F64)
        draws = [noisy_kfac.sample(kron, e.view(2, 3), num_data=30) - kron.layer.mean for e in basis]
        root = torch.stack([draw.flatten() for draw in draws], 1)
        draws = [full_gaussian.sample(full, e, num_data=30, prior=1e-14) - full.mean for e in basis]
        truth = torch.stack(draws, 1)
        torch.testing.assert_close(root @ root.T, truth @ truth.T, rtol=1e-5, atol=1e-7)
        weights = noisy_kfac.sample(kron, noise, num_data=30)
        grads = 4 * (weights @ rows.T - y.T) @ rows / 30
        (kron,) = noisy_kfac.update([kron], [grads], lr=0.5, beta=0.9, prior=1e-14, step=step)
        full = full_gaussian.update(
            full, grads.flatten(), torch.kron(left, moment), lr=0.5, betas=(0.9, 0.5), prior=1e-14, step=step
        )
        torch.testing.assert_close(kron.layer.mean.flatten(), full.mean, rtol=1e-5, atol=1e-6)


def test_one_weight_is_diagonal_kfac_and_full_alike():
    """E20, with prior and without any factorisation error left but π-damping's (s + √δ̃/π)(a + π√δ̃), π = √(a/s)."""
    s, a, prior = torch.tensor([[4.0]], dtype=F64), torch.tensor([[0.25]], dtype=F64), 0.01
    kron = noisy_kfac.initial_state(torch.zeros(1, 1, dtype=F64), KroneckerProduct(s, a), prior=prior)
    expected = (s * a).sqrt() + prior**0.5  # (√(sa) + √δ̃)²: the cross term 2√(saδ̃) is the known excess
    torch.testing.assert_close(kron.root.dense(), 1 / expected)
    nothing = noisy_kfac.initial_state(torch.zeros(1, 1, dtype=F64), KroneckerProduct(0 * s, 0 * a), prior=prior)
    full = full_gaussian.FullState(*(torch.zeros(*n, dtype=F64) for n in ((1,), (1, 1), (1,))))
    noise = torch.ones(1, dtype=F64)
    alike = full_gaussian.sample(full, noise, num_data=N, prior=prior)
    torch.testing.assert_close(noisy_kfac.sample(nothing, noise[None], num_data=N)[0], alike)
    torch.testing.assert_close(alike, noise / (N * prior) ** 0.5)  # diagonal: 1/√(N (s + δ̃)) at s = 0


def test_a_dead_layer_keeps_its_prior():
    """tr S = 0: the noise has precision δ, not more, whatever its inputs."""
    dead = KroneckerProduct(torch.zeros(2, 2, dtype=F64), 5 * spd(3, generator=seeded(0)))
    at = noisy_kfac.initial_state(torch.zeros(2, 3, dtype=F64), dead, prior=PRIOR)
    covariance = TAU / N * at.root.dense() @ at.root.dense().T
    torch.testing.assert_close(covariance, torch.eye(6, dtype=F64) / DELTA, rtol=1e-4, atol=1e-4)


def test_without_noise_it_is_kfac():
    at, grads = state(damping=0.1), [normal(2, 3, generator=seeded(s)) for s in range(3)]
    plain = at.layer
    for step, grad in enumerate(grads, 1):
        (at,) = noisy_kfac.update([at], [grad], lr=0.1, beta=0.9, prior=PRIOR, step=step, kl_clip=1e-3)
        (plain,) = kfac.update([plain], [grad], lr=0.1, beta=0.9, prior=PRIOR, step=step, kl_clip=1e-3)
    assert torch.equal(at.layer.mean, plain.mean)
