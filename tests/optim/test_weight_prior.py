"""A posterior as the next fit's prior: conjugate models in two parts, scalar priors, torch's KL, restarts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import OPTIMIZERS, construct, step_rules, through_a_file, train_on
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_bayes import KFAC, OGN, VOGN, VON, FullGaussian, MeanField, NoisyKFAC, Vadam
from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.optim import LinearSchedule, VadaGrad
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.optim.weight_prior import stated_prior_of
from lightning_bayes.posteriors import ScaledPosterior

F64 = torch.float64
MEAN_FIELD = [o for o in OPTIMIZERS if issubclass(o, VariationalOptimizer) and o not in {KFAC, NoisyKFAC}]
RULES = [(optimizer, rule) for optimizer in MEAN_FIELD for rule in step_rules(optimizer)]


def rows(count, generator):
    """Inputs with one nonzero feature each, so that the posterior is mean-field, and targets."""
    x = torch.eye(3, dtype=F64)[torch.arange(count) % 3] * torch.rand(count, 1, generator=generator, dtype=F64).add(0.5)
    return x, torch.randn(count, 1, generator=generator, dtype=F64)


def conjugate(x, y, tempering=1.0, **arguments):
    """The exact posterior in one step: the first pass has no noise, and the loss is quadratic."""
    model = nn.Linear(3, 1, bias=False).double()
    opt = VON(model, lr=1.0, betas=(0.0, 0.9), num_data=len(x), kl_weight=tempering, **arguments)
    train_on(opt, lambda: nn.MSELoss()(model(x), y))
    return opt.posterior()


@pytest.mark.parametrize("tempering", [1.0, 0.25])
def test_two_parts_in_turn_give_the_posterior_of_both(tempering, generator):
    """N(y; xw, 1/2), whose posterior has the precision (2/τ) Σ x² + δ."""
    (x1, y1), (x2, y2) = rows(7, generator), rows(11, generator)
    first = conjugate(x1, y1, tempering, prior_precision=0.7)
    second = conjugate(x2, y2, tempering, prior=first, prior_precision=123.0)
    x, y = torch.cat([x1, x2]), torch.cat([y1, y2])
    precision = 2 / tempering * x.square().sum(0) + 0.7
    torch.testing.assert_close(second.precision["weight"][0], precision)
    torch.testing.assert_close(second.mean["weight"][0], 2 / tempering * (x * y).sum(0) / precision)
    torch.testing.assert_close(second.prior_precision["weight"], first.precision["weight"])
    torch.testing.assert_close(second.prior_mean["weight"], first.mean["weight"])


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def batch(generator, count=16):
    x = torch.randn(count, 4, generator=generator, dtype=F64)
    return x, (x[:, 0] > 0).long()


def some_prior(model, generator, scale=50.0, names=None):
    """A posterior with a different precision for every weight."""
    known = {name: p.detach() for name, p in model.named_parameters() if names is None or name in names}
    mean = {n: p + 0.3 * torch.randn(p.shape, generator=generator, dtype=F64) for n, p in known.items()}
    precision = {n: scale * (0.1 + torch.rand(p.shape, generator=generator, dtype=F64)) for n, p in known.items()}
    return MeanField(mean, precision, dict.fromkeys(mean, 1.0), 10)


def train(opt, model, data, steps):
    train_on(opt, lambda: F.cross_entropy(model(data[0]), data[1]), steps)
    return opt


@pytest.mark.parametrize(("optimizer", "rule"), RULES, ids=lambda value: getattr(value, "__name__", value))
def test_equal_precisions_are_the_prior_of_one_number(optimizer, rule, generator):
    """Every algorithm and step takes the same path as under N(initial weights, 1/δ), whatever the group's δ."""
    found, data = [], batch(generator)
    falling = LinearSchedule(1.0, 0.5, 4)  # δ̃ falls
    for per_weight in (True, False):
        model = mlp()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        prior = MeanField(start, {n: torch.full_like(p, 30.0) for n, p in start.items()}, dict.fromkeys(start, 1.0), 10)
        given = (
            {"prior": prior, "prior_precision": 3.0}
            if per_weight
            else {"prior_mean": "initial", "prior_precision": 30.0}
        )
        weight = {} if optimizer.__name__ == "VadaGrad" else {"kl_weight": falling}  # VadaGrad requires 1
        opt = construct(optimizer, model, step_rule=rule, num_data=64, **given, **weight)
        found.append((train(opt, model, data, 5), model))
    (own, own_model), (shared, model) = found
    torch.testing.assert_close(list(own_model.parameters()), list(model.parameters()))
    if optimizer.noisy:
        assert own.posterior().prior_range() == (30.0, 30.0)
        torch.testing.assert_close(own.posterior().precision, shared.posterior().precision)
        torch.testing.assert_close(own.posterior().kl(), shared.posterior().kl())
        torch.testing.assert_close(own.effective_parameters(), shared.effective_parameters())


@pytest.mark.parametrize(
    "arguments", [{}, {"relative_noise": 0.2}, {"max_noise": 0.1}], ids=["bound", "shaped", "limited"]
)
@pytest.mark.parametrize("optimizer", [VOGN, VON, Vadam, VadaGrad])
def test_samples_have_the_precision_that_is_read_out(optimizer, arguments, generator):
    model = mlp()
    opt = optimizer(model, lr=1e-2, num_data=64, prior=some_prior(model, generator), **arguments)
    q = train(opt, model, batch(generator), 3).posterior()
    squares = []
    for sample in range(100):
        with torch.no_grad(), opt.sampled_params(sample):
            distance = {n: p - q.mean[n] for n, p in model.named_parameters()}
        squares.append(torch.cat([(distance[n].square() * q.precision[n]).flatten() for n in distance]))
    z = (torch.stack(squares).mean(0) - 1) / math.sqrt(2 / 100)
    assert z.abs().max() < 5
    assert abs(float(z.mean())) < 4 / math.sqrt(len(z))


@pytest.mark.parametrize("relative_noise", [None, 0.2])
def test_the_kl_is_that_of_the_normal_distributions(relative_noise, generator):
    """A layer that the prior does not name keeps the scalar prior."""
    model = mlp()
    prior = some_prior(model, generator, names=("0.weight", "0.bias"))
    base = torch.optim.Adam(model.parameters(), lr=1e-2)
    opt = VOGN(model, base=base, num_data=64, prior=prior, prior_precision=2.0, relative_noise=relative_noise)
    q = train(opt, model, batch(generator), 3).posterior()
    if relative_noise is None:
        assert q.prior_precision["2.weight"] == 2.0
        torch.testing.assert_close(q.prior_precision["0.weight"], prior.precision["0.weight"])
    expected = sum(
        kl_divergence(
            Normal(mean, q.precision[name].rsqrt()),
            Normal(torch.as_tensor(q.prior_mean.get(name, 0.0)), torch.as_tensor(q.prior_precision[name]).rsqrt()),
        ).sum()
        for name, mean in q.mean.items()
    )
    torch.testing.assert_close(q.kl(), expected)


def test_the_shaped_posterior_minimises_its_objective(generator):
    """(τ_t/Ñ) KL has the gradient δ̃ (μ - μ₀) at the mean, and the precision (Ñ/τ_t) s in addition to its prior's."""
    model = mlp()
    prior, data = some_prior(model, generator), batch(generator)
    base = torch.optim.Adam(model.parameters(), lr=1e-2)
    opt = train(VOGN(model, base=base, num_data=64, prior=prior, relative_noise=0.2), model, data, 3)
    q, group = opt.posterior(), opt.param_groups[0]
    for name, param in model.named_parameters():
        state, tau = opt.state[param], 64 / opt.state[param]["scale"]
        own = stated_prior_of(group, state)
        torch.testing.assert_close(own, prior.precision[name] / 64)
        pull = tau / 64 * q.prior_precision[name] * (q.mean[name] - q.prior_mean[name]).square()
        torch.testing.assert_close(pull, own * (q.mean[name] - prior.mean[name]).square())
        torch.testing.assert_close(q.precision[name] - q.prior_precision[name], 64 / tau * state["curvature"])


def test_the_users_optimizer_gets_the_gradient_of_loss_and_prior(generator):
    model, data = mlp(), batch(generator)
    prior = some_prior(model, generator)
    start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    pull = [(prior.precision[n] / 64 * (p - prior.mean[n]).square()).sum() / 2 for n, p in start.items()]
    loss = F.cross_entropy(torch.func.functional_call(model, start, data[0]), data[1]) + torch.stack(pull).sum()
    loss.backward()
    opt = OGN(model, base=torch.optim.SGD(model.parameters(), lr=1e-3), num_data=64, prior=prior)
    train(opt, model, data, 1)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), start[name].detach() - 1e-3 * start[name].grad)


def test_an_initial_precision_says_what_the_data_add(generator):
    """δ_j + P₀ - δ before the first update."""
    model = mlp()
    prior = some_prior(model, generator)
    q = VOGN(model, lr=0.1, num_data=64, prior=prior, prior_precision=2.0, init_precision=7.0).posterior()
    torch.testing.assert_close(q.precision, {name: value + 5.0 for name, value in prior.precision.items()})


@pytest.mark.parametrize("user", [True, False], ids=["user", "natural"])
def test_a_restart_keeps_the_prior(user, generator):
    """Only the file contains the prior: the new optimizer is constructed without it."""
    data, found = batch(generator), []
    prior = some_prior(mlp(), generator)

    def build(model, **given):
        how = {"base": torch.optim.Adam(model.parameters(), lr=1e-2), "relative_noise": 0.2} if user else {"lr": 1e-2}
        return VOGN(model, num_data=64, **how, **given)

    for stops in (False, True):
        model = mlp()
        opt = train(build(model, prior=prior), model, data, 3)
        if stops:
            weights, state = through_a_file((model.state_dict(), opt.state_dict()))
            model = mlp(seed=1)
            model.load_state_dict(weights)
            opt = build(model)
            opt.load_state_dict(state)
        found.append(train(opt, model, data, 3).posterior())
    straight, resumed = found
    for name in straight.mean:
        assert torch.equal(straight.mean[name], resumed.mean[name])
        assert torch.equal(straight.precision[name], resumed.precision[name])
        assert torch.equal(straight.prior_precision[name], resumed.prior_precision[name])
    assert torch.equal(straight.kl(), resumed.kl())


def test_the_optimizer_keeps_copies(generator):
    model = mlp()
    prior = some_prior(model, generator)
    before = {name: value.clone() for name, value in prior.precision.items()}
    opt = VOGN(model, lr=0.1, num_data=64, prior=prior)
    prior.precision["0.weight"].zero_()
    torch.testing.assert_close(opt.state[model[0].weight]["prior_precision"], before["0.weight"])


def test_a_posterior_of_another_width_counts_with_that_width(generator):
    model = mlp()
    prior = some_prior(model, generator)
    opt = VOGN(model, lr=0.1, num_data=64, prior=ScaledPosterior(prior, 2.0))
    torch.testing.assert_close(opt.state[model[0].weight]["prior_precision"], prior.precision["0.weight"] / 4)


def test_a_width_of_zero_is_no_prior(generator):
    model = mlp()
    with pytest.raises(PosteriorError, match=r"non-finite means or precisions.* in 0\.weight.*earlier checkpoint"):
        VOGN(model, lr=0.1, num_data=64, prior=ScaledPosterior(some_prior(model, generator), 0.0))


def test_wrong_priors_are_refused_in_one_sentence(generator):
    model = mlp()
    prior = some_prior(model, generator)
    renamed = MeanField({"head": prior.mean["0.bias"]}, {"head": prior.precision["0.bias"]}, {"head": 1.0}, 10)
    with pytest.raises(PosteriorError, match=r"names head, which Sequential does not have;.* are 0\.weight.*select"):
        VOGN(model, lr=0.1, num_data=64, prior=renamed)
    wide = {name: torch.ones(3, dtype=F64) for name in prior.mean}
    with pytest.raises(PosteriorError, match=r"0\.weight \(3,\) instead of \(8, 4\).*and 2 more"):
        VOGN(model, lr=0.1, num_data=64, prior=replace(prior, mean=wide, precision=wide))
    full = FullGaussian({"0.bias": torch.zeros(8)}, torch.eye(8), {"0.bias": 1.0}, 10)
    with pytest.raises(PosteriorError, match=r"is a FullGaussian.*marginals"):
        VOGN(model, lr=0.1, num_data=64, prior=full)
    with pytest.raises(PosteriorError, match=r"is a str.*load_posterior\(path\)"):
        VOGN(model, lr=0.1, num_data=64, prior="first.ckpt")
    with pytest.raises(HyperparameterError, match=r"NoisyKFAC does not support prior=MeanField.*VOGN"):
        NoisyKFAC(model, lr=0.1, num_data=64, prior=prior)


def test_a_precision_of_each_weight_has_the_shape_of_the_mean():
    with pytest.raises(PosteriorError, match="do not match for w"):
        MeanField({"w": torch.zeros(2)}, {"w": torch.ones(2)}, {"w": torch.ones(3)}, 10)
    q = MeanField({"w": torch.zeros(2)}, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 4.0])}, 10)
    assert repr(q) == "MeanField(2 weights in 1 tensors, num_data=10, prior_precision=1 to 4)"
