"""`max_noise`: an absolute bound on the noise, in samples and in saved posteriors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import IVON, VOGN, NoisyKFAC, VadaGrad, Vadam
from lightning_bayes.optim.noise import CounterNoise

BOUND, N, DELTA = 0.05, 40, 3.0


@pytest.fixture
def problem(generator):
    return torch.randn(16, 3, generator=generator), torch.randn(16, 2, generator=generator)


def train(build, problem, updates=3, **arguments):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = build(model, **{"lr": 1e-2, "num_data": N, "prior_precision": DELTA, "init_precision": DELTA, **arguments})
    for _ in range(updates):
        with opt.sampled_params():
            F.mse_loss(model(problem[0]), problem[1]).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def drawn(model, opt):
    """θ - μ of the weight, with the same ε in every call."""
    with torch.no_grad():
        sample = opt.draw_sample(CounterNoise(0))[model.weight].clone()
    return sample - model.weight.detach()


@pytest.mark.parametrize("build", [VOGN, Vadam, VadaGrad, IVON])
def test_it_adds_to_the_precision_of_the_noise_and_of_the_posterior(build, problem):
    model, opt = train(build, problem)
    unbound, free = opt.posterior().precision["weight"], drawn(model, opt)
    torch.testing.assert_close(unbound, N * opt.state[model.weight]["curvature"] + DELTA)
    opt.param_groups[0]["posterior"]["max_noise"] = BOUND
    opt.refresh_noise()
    bound = opt.posterior().precision["weight"]
    torch.testing.assert_close(bound, unbound + BOUND**-2)
    torch.testing.assert_close(drawn(model, opt) * bound.sqrt(), free * unbound.sqrt())


def test_under_a_temperature_it_adds_the_same(problem):
    model, opt = train(VOGN, problem, max_noise=BOUND, kl_weight=0.5)
    expected = 2 * N * opt.state[model.weight]["curvature"] + DELTA + BOUND**-2
    torch.testing.assert_close(opt.posterior().precision["weight"], expected)


def test_the_initial_precision_is_the_one_without_it():
    model = nn.Linear(3, 2)
    opt = VOGN(model, num_data=N, prior_precision=DELTA, init_precision=7.0, max_noise=BOUND)
    torch.testing.assert_close(opt.posterior().precision["weight"], torch.full((2, 3), 7.0 + BOUND**-2))


def test_the_step_does_not_see_it(problem):
    """Without noise and prior Vadam is Adam with ε = γ."""
    common = {"prior_precision": 1e-20, "init_precision": 1e-20, "damping": 1e-3, "betas": (0.9, 0.99)}
    model, _ = train(Vadam, problem, updates=10, max_noise=1e-12, **common)
    torch.manual_seed(0)
    other = nn.Linear(3, 2)
    adam = torch.optim.Adam(other.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3)
    for _ in range(10):
        adam.zero_grad()
        F.mse_loss(other(problem[0]), problem[1]).backward()
        adam.step()
    torch.testing.assert_close(model.weight, other.weight)


def test_beside_relative_noise_the_smaller_of_the_two_decides(problem):
    """If the bounds are far below the data's noise, the noise is flat and the bounds' precisions add up."""
    model, opt = train(VOGN, problem, relative_noise=1e-4)
    size = torch.maximum(model.weight.square().mean().sqrt(), opt.state[model.weight]["initial_rms"]).item()
    opt.param_groups[0]["posterior"]["max_noise"] = 1e-4
    opt.refresh_noise()
    precision = opt.posterior().precision["weight"]
    torch.testing.assert_close(precision, torch.full_like(precision, 1e8 + (1e-4 * size) ** -2), rtol=1e-4, atol=0)
    noise = drawn(model, opt)
    opt.param_groups[0]["posterior"]["relative_noise"] = 1e3
    opt.refresh_noise()
    torch.testing.assert_close(opt.posterior().precision["weight"].rsqrt().max().item(), 1e-4, rtol=1e-4, atol=0)
    assert not torch.equal(noise, drawn(model, opt))


def test_no_direction_of_a_kronecker_factored_posterior_is_wider(problem):
    torch.manual_seed(0)
    model, opt = train(NoisyKFAC, problem, max_noise=BOUND, stats_interval=1, inverse_interval=1)
    left, right = opt.posterior().factors["weight"]
    widths = torch.kron(left, right).inverse().diagonal().sqrt()
    assert torch.linalg.eigvalsh(torch.kron(left, right)).min() >= BOUND**-2
    draws = []
    with torch.no_grad():
        for counter in range(400):
            draws.append(opt.draw_sample(CounterNoise(counter))[model.weight].clone() - model.weight.detach())
    wanted = widths.view(2, 4)[:, :3]
    z = (torch.stack(draws).square().mean(0) / wanted.square() - 1) / math.sqrt(2 / len(draws))
    assert z.abs().max() < 4


def test_a_kronecker_factored_start_is_the_one_without_it():
    model = nn.Linear(3, 2, bias=False)
    opt = NoisyKFAC(model, num_data=N, prior_precision=DELTA, init_precision=7.0, max_noise=BOUND)
    left, right = opt.posterior().factors["weight"]
    torch.testing.assert_close(torch.kron(left, right), (7.0 + BOUND**-2) * torch.eye(6))


@pytest.mark.parametrize("value", [0, 0.0, -0.1, math.nan, math.inf, 1e-300])
def test_a_bound_that_is_not_above_zero_is_refused(value):
    with pytest.raises(HyperparameterError, match=r"max_noise=.* must be above 0, at least 1e-12\."):
        VOGNCallback(max_noise=value)
