"""The step of the user's own optimizer under a posterior: torch's optimizers are the truth."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import weights
from recorded_update import RecordedUpdate
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

from lightning_bayes.optim import IVON, VOGN, NoisyKFAC, Vadam
from lightning_bayes.optim.base_optimizer import BaseOptimizerStep

OPTIMIZERS = [
    partial(Adam, lr=1e-2),
    partial(Adam, lr=1e-2, betas=(0.8, 0.9), eps=1e-3, amsgrad=True),
    partial(AdamW, lr=1e-2, weight_decay=0.1),
    partial(SGD, lr=1e-3, momentum=0.9, nesterov=True),
    partial(RMSprop, lr=1e-2, centered=True),
    partial(Adagrad, lr=0.1),
    partial(NAdam, lr=1e-2),
]


@pytest.fixture
def problem(generator):
    return torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, opt, problem, steps):
    x, y = problem
    for step in range(steps):
        batch = slice(step % 4 * 16, step % 4 * 16 + 16)
        with opt.sampled_params():
            F.cross_entropy(model(x[batch]), y[batch]).backward()
        opt.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.func.__name__}-{o.keywords}")
@pytest.mark.parametrize("method", [VOGN, Vadam, IVON, NoisyKFAC])
def test_without_noise_it_is_the_users_training(optimizer, method, problem):
    """A tiny noise scale makes the noise negligible; the prior enters the plain loss as ½ δ̃ ‖μ‖²."""
    x, y = problem
    delta, num_data = 2.0, 64
    plain, bayesian = network(), network()
    opt = optimizer(plain.parameters())
    for step in range(40):
        batch = slice(step % 4 * 16, step % 4 * 16 + 16)
        opt.zero_grad()
        penalty = 0.5 * delta / num_data * sum(p.square().sum() for p in plain.parameters())
        (F.cross_entropy(plain(x[batch]), y[batch]) + penalty).backward()
        opt.step()
    noisy = method(
        bayesian, base=optimizer(bayesian.parameters()), num_data=num_data, prior_precision=delta, relative_noise=1e-9
    )
    train(bayesian, noisy, problem, 40)
    torch.testing.assert_close(weights(bayesian), weights(plain), rtol=1e-4, atol=1e-5)


def test_a_stated_prior_takes_the_place_of_the_users_penalty(problem):
    """SGD adds 0.3 μ by itself; the gradient of the prior is δ̃ μ with or without it."""
    ends = []
    for decay in (0.0, 0.3):
        model = network()
        base = SGD(model.parameters(), lr=1e-2, weight_decay=decay)
        opt = VOGN(model, base=base, num_data=64, prior_precision=2.0, relative_noise=1e-9)
        train(model, opt, problem, 20)
        ends.append(weights(model))
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_moves_a_tensor_by_a_part_of_its_size_at_most(momentum):
    """A huge gradient under SGD moves by 0.03 r at first, and its momentum by less and less: 0.03 r Σ_t mᵗ in all."""
    model = nn.Linear(3, 2, bias=False)
    start, size = model.weight.detach().clone(), model.weight.detach().square().mean().sqrt()
    opt = VOGN(model, base=SGD(model.parameters(), lr=0.5, momentum=momentum), num_data=4, relative_noise=1e-9)
    for factor in [1e6, *[0.0] * 300]:
        with opt.sampled_params():
            (factor * model(torch.ones(4, 3))).mean().backward()
        opt.param_groups[0]["posterior"]["prior_on_mean"] = False
        opt.step()
        if factor:
            torch.testing.assert_close((model.weight - start).square().mean().sqrt(), 0.03 * size, rtol=1e-4, atol=0)
    moved = (model.weight - start).square().mean().sqrt()
    torch.testing.assert_close(moved, 0.03 * size / (1 - momentum), rtol=1e-4, atol=0)


def test_a_step_within_the_bound_is_exactly_the_users(problem):
    plain, bayesian = network(), network()
    opt = SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    noisy = VOGN(bayesian, base=SGD(bayesian.parameters(), lr=1e-3, momentum=0.9), num_data=64, prior_on_mean=False)
    x, y = problem
    for _ in range(5):
        bayesian.load_state_dict(plain.state_dict())  # where the noise is drawn does not matter here
        with noisy.sampled_params():
            F.cross_entropy(bayesian(x), y).backward()
        for mine, theirs in zip(plain.parameters(), bayesian.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        noisy.step()
        opt.step()
        assert torch.equal(weights(plain), weights(bayesian))


def test_the_curvature_is_the_running_mean_of_what_is_measured(problem):
    """A learning rate of zero keeps the mean, and tiny noise the point: every pass then measures the same function."""
    model, (x, y) = network(), problem
    opt = VOGN(model, base=SGD(model.parameters(), lr=0.0), num_data=64, relative_noise=1e-9)
    train(model, opt, problem, 4)  # every example once
    grads = torch.func.vmap(
        torch.func.grad(lambda p, a, b: F.cross_entropy(torch.func.functional_call(model, p, (a,)), b)), (None, 0, 0)
    )(dict(model.named_parameters()), x, y)
    for name, param in model.named_parameters():
        expected = grads[name].square().mean(0)
        torch.testing.assert_close(opt.state[param]["curvature"], expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("prior_on_mean", [True, False])
@pytest.mark.parametrize("centre", [None, [1.0, -2.0]])
def test_the_priors_gradient_is_that_of_its_negative_log_density(centre, prior_on_mean):
    """G = ĝ + ∂/∂μ ½ δ̃ ‖μ - μ₀‖², the truth from autograd."""
    prior_means = [] if centre is None else [torch.tensor(centre)]
    grad = torch.tensor([0.25, 0.5])
    update = RecordedUpdate([torch.tensor([3.0, 4.0])], [torch.zeros(2)], grads=[grad.clone()], prior_means=prior_means)
    update.group["posterior"] |= {"prior_precision": 5.0, "kl_weight": 0.5, "prior_on_mean": prior_on_mean}
    BaseOptimizerStep(SGD(update.params, lr=0.1)).apply(update)
    mean = update.params[0].detach().clone().requires_grad_()
    away = mean if centre is None else mean - prior_means[0]
    (penalty,) = torch.autograd.grad(0.5 * (0.5 * 5.0 / 10) * away.square().sum(), mean)
    torch.testing.assert_close(update.params[0].grad, grad + penalty if prior_on_mean else grad)


def test_it_updates_the_curvature_and_leaves_the_means_to_the_base_optimizer():
    update = RecordedUpdate([torch.tensor([3.0])], [torch.ones(1)], grads=[torch.tensor([2.0])], index=4)
    update.group["posterior"] |= {"prior_on_mean": False}
    update.states = [{"initial_rms": torch.tensor(1e6)}]
    step = BaseOptimizerStep(SGD(update.params, lr=0.25))
    step.apply(update)
    assert update.calls == [("average_",)]
    torch.testing.assert_close(update.params[0].detach(), torch.tensor([3.0]))
    step.finish(step.base.param_groups, dict(zip(update.params, update.states, strict=True)))
    torch.testing.assert_close(update.params[0].detach(), torch.tensor([2.5]))
