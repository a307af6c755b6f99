"""Noise precision: moments, densities and optimality against torch.distributions, quadrature and autograd."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Gamma, Normal, StudentT, kl_divergence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bayes.errors import HyperparameterError, UnknownNumDataError
from lightning_bayes.zoo import MLP, BayesRegressor
from lightning_bayes.zoo.tasks.noise import FixedNoise, GammaNoise, LearnedNoise

F64 = torch.float64


def residuals(count, std=0.3):
    return std * torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=F64)


def gamma_noise(num_data=40, mean_square=0.09, prior=(6.0, 6.0)):
    noise = GammaNoise(mean_square**0.5, prior).double()
    noise.count(num_data)
    return noise


def bound(shape, rate, squares, prior):
    """The terms of q(τ) in Zhang et al. 2018, eqs. 23-24, for fixed outputs."""
    n = len(squares)
    expected = 0.5 * (n * (torch.digamma(shape) - rate.log()) - shape / rate * squares.sum())
    return expected - kl_divergence(Gamma(shape, rate), Gamma(*(torch.tensor(p, dtype=F64) for p in prior)))


def test_the_gamma_posterior_is_the_stationary_point_of_the_papers_bound():
    squares = residuals(40).square()
    noise = gamma_noise(40, float(squares.mean()))
    shape, rate = (value.detach().clone().requires_grad_() for value in noise.posterior())
    bound(shape, rate, squares, noise.prior).backward()
    assert abs(shape.grad) < 1e-9 * 40
    assert abs(rate.grad) < 1e-9 * 40
    with torch.no_grad():
        best = bound(shape, rate, squares, noise.prior)
        assert all(bound(shape * a, rate * b, squares, noise.prior) < best for a, b in [(1.1, 1.0), (1.0, 0.9), (2, 2)])


def test_moments_of_the_gamma_equal_draws():
    noise = gamma_noise()
    draws = Gamma(*noise.posterior()).sample((100_000,))
    for moment, values in zip(noise.moments(), (draws, draws.log()), strict=True):
        assert abs(values.mean() - moment) < 4 * values.std() / len(values) ** 0.5


def test_the_predictive_density_is_students_t():
    noise, targets = gamma_noise(num_data=10), residuals(20, std=2.0)
    shape, rate = noise.posterior()
    truth = StudentT(2 * shape, torch.tensor(0.1, dtype=F64), (rate / shape).sqrt()).log_prob(targets)
    torch.testing.assert_close(noise.log_density(torch.full_like(targets, 0.1), targets), truth)
    torch.testing.assert_close(noise.distribution(torch.tensor(0.1, dtype=F64)).log_prob(targets), truth)


def test_the_predictive_density_is_accurate_for_large_data_sets():
    """In float32, the difference of two log-gammas of 10⁶ has no correct digits."""
    noise = GammaNoise(0.3)
    noise.count(2_000_000)
    got = noise.log_density(torch.zeros(3), torch.tensor([0.0, 0.3, -0.6]))
    torch.testing.assert_close(got, Normal(0.0, 0.3).log_prob(torch.tensor([0.0, 0.3, -0.6])), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: FixedNoise(0.3), lambda: LearnedNoise(0.3).double(), gamma_noise])
def test_the_loss_is_the_expected_negative_log_density(make):
    """By quadrature over the precision, which has a single value if it is fixed."""
    noise, targets = make(), residuals(7)
    if isinstance(noise, GammaNoise):
        grid = Gamma(*noise.posterior())
        tau = torch.linspace(1e-3, 80, 200_001, dtype=F64)
        weights = grid.log_prob(tau).exp() * (tau[1] - tau[0])
    else:
        tau, weights = torch.tensor([1 / 0.3**2], dtype=F64), torch.ones(1, dtype=F64)
    densities = torch.stack([Normal(0.2, tau**-0.5).log_prob(y) @ weights for y in targets])
    loss = noise.expected_nll(torch.full_like(targets, 0.2), targets)
    torch.testing.assert_close(loss, -densities.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [LearnedNoise, GammaNoise])
def test_the_running_mean_square_converges(kind):
    noise, values = kind(1.0).double(), residuals(1000)
    noise.count(1000)
    for _ in range(20):
        for batch in values.split(50):
            noise.observe(batch)
    assert float(noise.mean_square) == pytest.approx(float(values.square().mean()), rel=0.05)


def test_learned_noise_maximises_the_likelihood():
    noise, values = LearnedNoise(1.0).double(), residuals(50)
    noise.count(50)
    noise.observe(values)  # one batch of all data
    log_std = noise.moments()[1].mul(-0.5).requires_grad_()
    Normal(torch.zeros((), dtype=F64), log_std.exp()).log_prob(values).mean().backward()
    assert abs(log_std.grad) < 1e-9


def test_non_finite_residuals_are_ignored():
    noise = LearnedNoise(0.5)
    noise.count(10)
    noise.observe(torch.tensor([1.0, torch.inf]))
    noise.observe(torch.tensor([torch.nan]))
    assert float(noise.mean_square) == 0.25


@pytest.mark.parametrize("noise", ["learned", "gamma"])
def test_training_finds_the_noise_of_the_data(noise, quiet_trainer):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 1, generator=generator)
    targets = inputs[:, 0] + 0.2 * torch.randn(400, generator=generator)
    task = BayesRegressor(
        MLP(1, 1, hidden=()), lambda params: torch.optim.Adam(params, lr=0.05), noise=noise, noise_prior=(1.0, 0.1)
    )
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=40)
    quiet_trainer(max_epochs=20).fit(task, loader, loader)
    assert task.lightning_bayes_likelihood.std == pytest.approx(0.2, rel=0.1)  # the standard error of the data is 3.5 %


def test_a_checkpoint_keeps_the_noise(quiet_trainer):
    task = BayesRegressor(MLP(1, 1), noise="gamma")
    task.noise.count(100)
    task.noise.observe(torch.zeros(50))
    other = BayesRegressor(MLP(1, 1), noise="gamma")
    other.load_state_dict(task.state_dict())
    assert (
        other.lightning_bayes_likelihood.std
        == task.lightning_bayes_likelihood.std
        != BayesRegressor(MLP(1, 1)).lightning_bayes_likelihood.std
    )


def test_learned_noise_rejects_data_without_a_length(quiet_trainer):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(1), torch.zeros(()))] * 4)

    loader = DataLoader(Stream(), batch_size=2)
    with pytest.raises(UnknownNumDataError, match=r"averages over an epoch, but Stream has no length.*noise='fixed'"):
        quiet_trainer(max_epochs=1).fit(BayesRegressor(MLP(1, 1), noise="learned"), loader, loader)
    quiet_trainer(max_epochs=1).fit(BayesRegressor(MLP(1, 1)), loader, loader)


def test_all_arguments_out_of_range_are_listed():
    message = r"noise='laplace', but.*noise_std=-1.0, but.*noise_prior=\(6.0, 0.0\), but shape and rate"
    with pytest.raises(HyperparameterError, match=message):
        BayesRegressor(MLP(1, 1), noise_std=-1.0, noise="laplace", noise_prior=(6.0, 0.0))
