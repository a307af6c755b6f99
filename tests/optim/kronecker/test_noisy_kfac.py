"""Noisy K-FAC: the covariance of its noise, conjugate regression, and the optimizer against Algorithm 2 written out."""

from __future__ import annotations

import pytest
import torch
from kronecker_layers import sample_layer, start, take_step
from random_matrices import F64, dense_damped, normal, seeded, spd
from torch import nn

from lightning_bayes.curvature.factors import input_factor
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim import CounterNoise, NoisyKFAC
from lightning_bayes.optim.dense import full_gaussian
from lightning_bayes.posteriors import kronecker_precision

N, TAU, DELTA = 50.0, 0.3, 2.0
PRIOR = TAU * DELTA / N  # δ̃
NOISE = {"num_data": N, "kl_weight": TAU}


def state(seed=0, damping=0.1, damping_in_noise=False):
    generator = seeded(seed)
    curvature = KroneckerProduct(spd(2, generator=generator), spd(3, generator=generator))
    mean = normal(2, 3, generator=generator)
    noise_damping = damping if damping_in_noise else 0.0
    return start(mean, curvature, prior=PRIOR, damping=damping, noise_damping=noise_damping)


def sample(layer, noise, **scale):
    return sample_layer(layer, noise, **(scale or NOISE))


@pytest.mark.parametrize("in_noise", [False, True])
def test_the_noise_has_the_papers_covariance(in_noise):
    """E17: T Tᵀ = (τ/Ñ) (S^γ)⁻¹ ⊗ (A^γ)⁻¹ with non-diagonal S and A of different sizes; γ in or not in the noise."""
    at = state(damping_in_noise=in_noise)
    basis = torch.eye(6, dtype=F64).view(6, 2, 3)
    root = torch.stack([(sample(at, e) - at.mean).flatten() for e in basis], 1)
    dense = dense_damped(at.curvature, PRIOR + (0.1 if in_noise else 0.0))
    torch.testing.assert_close(root @ root.T, TAU / N * torch.linalg.inv(dense))


@pytest.mark.parametrize("in_noise", [False, True])
def test_the_preconditioner_has_both_dampings(in_noise):
    at, grad = state(damping_in_noise=in_noise), normal(2, 3, generator=seeded(7))
    (new,) = take_step([at], [grad], lr=1.0, prior=PRIOR)
    step = torch.linalg.solve(dense_damped(at.curvature, PRIOR + 0.1), (grad + PRIOR * at.mean).flatten())
    torch.testing.assert_close((at.mean - new.mean).flatten(), step)


def test_the_posterior_of_checkpoints_is_the_one_sampled_from():
    at = state()
    precision = kronecker_precision(at.curvature, N / TAU, PRIOR)
    root = at.root.dense() * (TAU / N) ** 0.5
    torch.testing.assert_close(torch.linalg.inv(root @ root.T), precision.dense())


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
    at = start(torch.zeros(2, 3, dtype=F64), curvature, prior=1e-14)
    grad = 4 * (at.mean @ rows.T - y.T) @ rows / 30
    (new,) = take_step([at], [grad], lr=1.0, prior=1e-14)
    torch.testing.assert_close(new.mean.T, torch.linalg.lstsq(rows, y).solution, rtol=1e-6, atol=1e-6)
    covariance = at.root.dense() @ at.root.dense().T / 30
    exact = torch.kron(torch.eye(2, dtype=F64), torch.linalg.inv(4 * rows.T @ rows).contiguous())
    torch.testing.assert_close(covariance, exact, rtol=1e-6, atol=1e-6)


def test_noisy_kfac_equals_full_nng_where_the_factorisation_is_exact():
    """Without a prior π-damping adds no cross terms, so noise and path are the same up to rounding."""
    rows, y, moment = regression(2, seed=4)
    left = 4 * torch.eye(2, dtype=F64)
    kron = start(torch.zeros(2, 3, dtype=F64), KroneckerProduct(left, moment), prior=1e-14)
    full = full_gaussian.FullState(torch.zeros(6, dtype=F64), torch.kron(left, moment), torch.zeros(6, dtype=F64))
    for step in range(1, 4):
        noise = normal(2, 3, generator=seeded(step))
        basis = torch.eye(6, dtype=F64)
        draws = [sample(kron, e.view(2, 3), num_data=30) - kron.mean for e in basis]
        root = torch.stack([draw.flatten() for draw in draws], 1)
        draws = [full_gaussian.sample(full, e, num_data=30, prior=1e-14) - full.mean for e in basis]
        truth = torch.stack(draws, 1)
        torch.testing.assert_close(root @ root.T, truth @ truth.T, rtol=1e-5, atol=1e-7)
        weights = sample(kron, noise, num_data=30)
        grads = 4 * (weights @ rows.T - y.T) @ rows / 30
        (kron,) = take_step([kron], [grads], lr=0.5, beta=0.9, prior=1e-14, step=step)
        full = full_gaussian.update(
            full, grads.flatten(), torch.kron(left, moment), lr=0.5, betas=(0.9, 0.5), prior=1e-14, step=step
        )
        torch.testing.assert_close(kron.mean.flatten(), full.mean, rtol=1e-5, atol=1e-6)


def test_one_weight_is_diagonal_kfac_and_full_alike():
    """E20, with prior and without any factorisation error left but π-damping's (s + √δ̃/π)(a + π√δ̃), π = √(a/s)."""
    s, a, prior = torch.tensor([[4.0]], dtype=F64), torch.tensor([[0.25]], dtype=F64), 0.01
    kron = start(torch.zeros(1, 1, dtype=F64), KroneckerProduct(s, a), prior=prior)
    expected = (s * a).sqrt() + prior**0.5  # (√(sa) + √δ̃)²: the cross term 2√(saδ̃) is the known excess
    torch.testing.assert_close(kron.root.dense(), 1 / expected)
    nothing = start(torch.zeros(1, 1, dtype=F64), KroneckerProduct(0 * s, 0 * a), prior=prior)
    full = full_gaussian.FullState(*(torch.zeros(*n, dtype=F64) for n in ((1,), (1, 1), (1,))))
    noise = torch.ones(1, dtype=F64)
    alike = full_gaussian.sample(full, noise, num_data=N, prior=prior)
    torch.testing.assert_close(sample(nothing, noise[None], num_data=N)[0], alike)
    torch.testing.assert_close(alike, noise / (N * prior) ** 0.5)  # diagonal: 1/√(N (s + δ̃)) at s = 0


def test_a_dead_layer_keeps_its_prior():
    """tr S = 0: the noise has exactly the precision δ for any inputs."""
    dead = KroneckerProduct(torch.zeros(2, 2, dtype=F64), 5 * spd(3, generator=seeded(0)))
    at = start(torch.zeros(2, 3, dtype=F64), dead, prior=PRIOR)
    covariance = TAU / N * at.root.dense() @ at.root.dense().T
    torch.testing.assert_close(covariance, torch.eye(6, dtype=F64) / DELTA, rtol=1e-4, atol=1e-4)


# -- the optimizer against Zhang et al. 2018, Algorithm 2, one example and one matrix at a time --

SIDES, EXAMPLES = [(4, 4), (2, 5)], 6  # rows and columns of the matrices of 3-4-2
ETA, LAMBDA, EXTRINSIC, RATE, NEW = 0.1, 0.5, 0.05, 0.2, 0.3
INTRINSIC = LAMBDA / (N * ETA)


def data_and_net():
    generator = seeded(0)
    x, y = normal(EXAMPLES, 3, generator=generator), normal(EXAMPLES, 2, generator=generator)
    torch.manual_seed(0)
    return x, y, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def matrices(net):
    return [torch.cat([net[i].weight, net[i].bias[:, None]], 1).detach().clone() for i in (0, 2)]


def damped_factors(s, a, damping):
    ratio = ((a.trace() / len(a)) / (s.trace() / len(s))).sqrt()
    root = damping**0.5
    return s + root / ratio * torch.eye(len(s), dtype=F64), a + ratio * root * torch.eye(len(a), dtype=F64)


def example_terms(weights, x, y):
    """For one example: δ aᵀ, δ δᵀ and a aᵀ of both layers, by autograd."""
    one = torch.ones(1, dtype=F64)
    first = torch.cat([x, one])
    hidden = (weights[0] @ first).requires_grad_()
    second = torch.cat([hidden.tanh(), one])
    output = weights[1] @ second
    deltas = torch.autograd.grad((output - y).square().sum(), [hidden, output])
    inputs = [first, second.detach()]
    return [(torch.outer(d, a), torch.outer(d, d), torch.outer(a, a)) for d, a in zip(deltas, inputs, strict=True)]


def algorithm_2(x, y, means, samples, steps, at_sample):
    """Without momentum, with T_stats = T_inv = 1 and factors that start from the identity."""
    s, a = [torch.eye(n, dtype=F64) for n, _ in SIDES], [torch.eye(n, dtype=F64) for _, n in SIDES]
    for step in range(steps):
        gradients, measured = [0 * m for m in means], [[0 * f for f in factors] for factors in (s, a)]
        for k in range(samples):
            noise, weights = CounterNoise(0, step, k), []
            for i, mean in enumerate(means):
                drawn = [torch.empty(SIDES[i][0], SIDES[i][1] - 1, dtype=F64), torch.empty(SIDES[i][0], dtype=F64)]
                noise.fill_(drawn)
                left, right = (torch.linalg.inv(f) for f in damped_factors(s[i], a[i], INTRINSIC))
                # Every root has this covariance; these roots map the same E to the same W.
                left, right = (torch.linalg.cholesky(f.flip(0, 1)).flip(0, 1) for f in (left, right))
                e = torch.cat([drawn[0], drawn[1][:, None]], 1)
                weights.append(mean + (LAMBDA / N) ** 0.5 * left @ e @ right.T)
            for example in range(EXAMPLES):
                for i, terms in enumerate(example_terms(weights, x[example], y[example])):
                    gradients[i] = gradients[i] + terms[0] / (EXAMPLES * samples)
                    for factors, term in zip(measured, terms[1:], strict=True):
                        factors[i] = factors[i] + term / (EXAMPLES * samples)
            for i, place in enumerate(weights if at_sample else means):
                gradients[i] = gradients[i] + INTRINSIC * place / samples
        for i in range(2):
            s[i], a[i] = ((1 - NEW) * old[i] + NEW * new[i] for old, new in zip((s, a), measured, strict=True))
            left, right = (torch.linalg.inv(f) for f in damped_factors(s[i], a[i], INTRINSIC + EXTRINSIC))
            means[i] = means[i] - RATE * left @ gradients[i] @ right
    return means


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("prior_at", ["mean", "sample"])
def test_twenty_updates_are_those_of_algorithm_2(prior_at, samples):
    x, y, net = data_and_net()
    expected = algorithm_2(x, y, matrices(net), samples, 20, prior_at == "sample")
    opt = NoisyKFAC(
        net,
        lr=RATE,
        betas=(0.0, 1 - NEW),
        num_data=int(N),
        prior_precision=1 / ETA,
        kl_weight=LAMBDA,
        damping=EXTRINSIC,
        init_precision=N / LAMBDA * (1 + INTRINSIC**0.5) ** 2,  # of the damped identity
        mc_samples=samples,
        stats_interval=1,
        inverse_interval=1,
        prior_at=prior_at,
    )

    def closure():
        opt.zero_grad()
        loss = (net(x) - y).square().sum(1).mean()
        loss.backward()
        return loss

    for _ in range(20):
        opt.step(closure)
    for found, truth in zip(matrices(net), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def test_an_unknown_place_of_the_prior_is_refused():
    with pytest.raises(HyperparameterError, match=r"prior_at='weights' must be 'mean' or 'sample'"):
        NoisyKFAC(nn.Linear(2, 1), prior_at="weights")
