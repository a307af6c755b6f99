"""Antithetic noise and the stored covariance, compared with fresh draws and with the equations."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import reparameterised
from torch import nn

from lightning_bayes.optim import IVON, VOGN
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.noise import CounterNoise


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(generator):
    return torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator)


def optimizer(model, lr=0.0, **arguments):
    base = torch.optim.SGD(model.parameters(), lr=lr)
    return VOGN(model, base=base, num_data=50, **{"relative_noise": 0.3, "curvature_interval": 100, **arguments})


def updates(opt, model, batch, count):
    """θ - μ of the first weight in each update."""
    found = []
    for _ in range(count):

        def closure():
            opt.zero_grad()
            found.append(model[0].weight.detach() - opt.stashed_means().get(model[0].weight, model[0].weight).detach())
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        opt.step(closure)
    return found


def test_two_updates_share_a_draw_with_opposite_signs(generator):
    """Without measurements after the tenth update and with lr = 0, only the noise changes."""
    model = network()
    found = updates(optimizer(model), model, data(generator), 18)
    for first in (10, 12, 14, 16):
        torch.testing.assert_close(found[first + 1], -found[first], rtol=1e-4, atol=1e-7)
    assert not torch.allclose(found[12].abs(), found[10].abs(), rtol=0.1)


@pytest.mark.parametrize(
    "arguments", [{"lr": 0.0, "init_precision": 80.0}, {"lr": 0.0, "init_precision": 80.0, "antithetic": False}]
)
def test_the_papers_step_draws_for_every_update(arguments, generator):
    model = network()
    opt = VOGN(model, num_data=50, betas=(0.9, 0.999), **arguments)
    found = updates(opt, model, data(generator), 4)
    assert not any(torch.allclose(found[i + 1], -found[i], rtol=0.1) for i in range(3))


def test_the_papers_step_shares_draws_where_it_is_asked(generator):
    model = network()
    opt = VOGN(
        model, lr=0.0, num_data=50, init_precision=80.0, antithetic=True, betas=(0.9, 0.9999), prior_precision=40.0
    )
    found = updates(opt, model, data(generator), 4)
    assert [torch.equal(a.sign(), -b.sign()) for a, b in pairwise(found)] == [True, False, True]


def test_a_draw_that_was_kept_is_the_one_drawn_again(generator, monkeypatch):
    batch, results, drawn = data(generator), [], []
    draw_, sample = CounterNoise.draw_, DiagonalFamily.sample

    def forgetful(self, *arguments, **keywords):
        self.kept_draws = None
        return sample(self, *arguments, **keywords)

    monkeypatch.setattr(CounterNoise, "draw_", lambda self, tensors: (drawn.append(1), draw_(self, tensors)))
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(DiagonalFamily, "sample", forgetful)
        model = network()
        drawn.clear()
        updates(optimizer(model, lr=0.1), model, batch, 25)
        results.append(([p.detach().clone() for p in model.parameters()], len(drawn)))
    (kept, few), (anew, many) = results
    assert all(torch.equal(a, b) for a, b in zip(kept, anew, strict=True))
    assert (few, many) == (13, 24)  # the first update has no noise, so its twin draws for itself


def test_pairs_are_uncorrelated_and_a_pair_has_opposite_signs():
    """The Gram matrix of twenty updates' draws, in standard errors."""
    drawn = []
    for update in range(20):
        epsilon = torch.empty(300, 300)
        CounterNoise(0, update, 0, antithetic=True).fill_([epsilon])
        drawn.append(epsilon.flatten().double())
    gram = torch.stack(drawn) @ torch.stack(drawn).T / 300**2
    opposite = torch.eye(10).repeat_interleave(2, 0).repeat_interleave(2, 1)
    opposite[0::2, 1::2] *= -1
    opposite[1::2, 0::2] *= -1
    assert ((gram - opposite) * 300).abs().max() < 5


def test_the_shape_follows_a_curvature_that_changes(generator):
    model = network()
    opt = optimizer(model, lr=0.1)
    batch = data(generator)
    updates(opt, model, batch, 12)
    for _ in range(2):
        precisions = opt.posterior().precision
        noise = CounterNoise(7)
        sample = opt.draw_sample(noise)
        names = dict(model.named_parameters())
        draws = [torch.empty_like(param) for param in names.values()]
        CounterNoise(7).fill_(draws)
        for (name, param), epsilon in zip(names.items(), draws, strict=True):
            torch.testing.assert_close(sample[param], param.detach() + epsilon * precisions[name].rsqrt())
        opt.state[model[0].weight]["curvature"].mul_(3.0)
        opt.state[model[2].weight]["curvature"] = opt.state[model[2].weight]["curvature"].flip(0)


@pytest.mark.parametrize("done", [7, 10, 23])
def test_the_scale_of_the_noise_is_that_of_every_tenth_update(done, generator):
    """IVON's s changes in every update; size, γ and mean 1/(s + γ) are those of the last tenth update, if there was one."""
    model, batch = network(), data(generator)
    weight = model[0].weight
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = IVON(model, base=base, num_data=50, relative_noise=0.3, noise_flatness=0.1, betas=(0.9, 0.9))
    opt.param_groups[0]["posterior"]["prior_on_mean"] = False
    stored = done // 10 * 10 or done
    updates(opt, model, batch, stored)
    s = opt.state[weight]["curvature"].clamp_min(0)
    size = weight.detach().square().mean().sqrt().clamp_min(opt.state[weight]["initial_rms"])
    damping = 0.1 * s.mean()
    scale = 50 + (1 / (s + damping)).mean() / (0.3 * size) ** 2
    updates(opt, model, batch, done - stored)
    expected = scale * (opt.state[weight]["curvature"].clamp_min(0) + damping)
    torch.testing.assert_close(opt.posterior().precision["0.weight"], expected)


@pytest.mark.parametrize("done", range(9, 22))
def test_a_run_goes_on_to_the_same_bits_after_any_update(done, generator):
    batch, ends = data(generator), []
    for resumes in (False, True):
        model = network()
        opt = optimizer(model, lr=0.1, curvature_interval=10)
        updates(opt, model, batch, done)
        if resumes:
            saved, state = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
            model = network()
            opt = optimizer(model, lr=0.1, curvature_interval=10)
            model.load_state_dict(state)
            opt.load_state_dict(saved)
        updates(opt, model, batch, 4)
        ends.append([*model.parameters(), *opt.posterior().precision.values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_pair_measures_the_curvature_of_a_quadratic_without_its_gradient():
    """ĥ = ĝ ε / σ with g = a + b (θ - μ): of ±ε the mean is b ε², and over many pairs b, in standard errors."""
    a, b, std, count = 5.0, 2.0, 0.1, 4000
    estimates = []
    for update in range(2 * count):
        epsilon = torch.empty(1, dtype=torch.float64)
        CounterNoise(0, update, 0, antithetic=True).fill_([epsilon])
        sample = std * epsilon
        grad = a + b * sample
        estimates.append(reparameterised(grad, sample, torch.zeros_like(sample), torch.tensor(1 / std**2)))
    pairs = torch.stack(estimates).view(count, 2).mean(1)
    first = torch.empty(1, dtype=torch.float64)
    CounterNoise(0, 0, 0).fill_([first])
    assert pairs[0].item() == pytest.approx(b * first.item() ** 2)
    z = (pairs.mean() - b) / (pairs.std() / count**0.5)
    assert abs(z) < 4
    alone = torch.stack(estimates)[::2].std()
    assert pairs.std() < 0.1 * alone  # the gradient's part, a ε / σ, cancels


def test_the_default_step_of_ivon_shares_draws_and_rests_at_the_hessian(generator):
    """Linear regression with unit Hessian: s settles at 1, in standard errors of a long average."""
    x = torch.randn(200, 2, generator=generator)
    x = torch.linalg.qr(x - x.mean(0))[0] * 200**0.5
    model = nn.Linear(2, 1, bias=False)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    opt = IVON(model, base=still, num_data=200, betas=(0.9, 0.999), init_precision=200.0, relative_noise=None)
    assert opt.param_groups[0]["posterior"]["antithetic"] is True
    for _ in range(1500):
        with opt.sampled_params():
            (0.5 * F.mse_loss(model(x), torch.zeros(200, 1))).backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(opt.state[model.weight]["curvature"], torch.ones(1, 2), rtol=0.25, atol=0)


@pytest.mark.parametrize("relative_noise", [None, 0.3])
def test_the_row_of_padding_has_no_noise_and_the_others_have(relative_noise, generator):
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2))
    opt = VOGN(model, lr=0.01, num_data=50, init_precision=80.0, relative_noise=relative_noise)
    tokens = torch.tensor([[1, 2], [3, 0], [4, 1]])
    for _ in range(3):
        with opt.sampled_params():
            F.cross_entropy(model(tokens), torch.tensor([0, 1, 0])).backward()
        opt.step()
        opt.zero_grad()
    drawn = opt.posterior().sample(generator)["0.weight"] - model[0].weight.detach()
    assert drawn[0].abs().max() < 1e-10
    assert drawn[1:].abs().min() > 1e-5


class Table(nn.Module):
    """A table without a module of its own."""

    def __init__(self, look_up, tied):
        super().__init__()
        self.weight, self.look_up, self.tied = nn.Parameter(torch.randn(5, 3)), look_up, tied

    def forward(self, tokens):
        found = self.look_up(tokens, self.weight)
        return F.linear(found.sum(1), self.weight) if self.tied else found.sum(1)


LOOK_UPS = {
    "first row": (lambda x, w: F.embedding(x, w, padding_idx=0), 0),
    "last row": (lambda x, w: F.embedding(x, w, -1), 4),
    "a bag": (lambda x, w: F.embedding_bag(x, w, padding_idx=0)[:, None], 0),
    "no padding": (lambda x, w: F.embedding(x, w), None),
    "two paddings": (lambda x, w: F.embedding(x, w, padding_idx=0) + F.embedding(x, w, padding_idx=1), None),
}


@pytest.mark.filterwarnings("ignore:.*all examples share these:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LOOK_UPS)
def test_the_padding_of_a_table_without_a_module_has_no_noise(name, tied, generator):
    torch.manual_seed(0)
    look_up, padding = LOOK_UPS[name]
    model = Table(look_up, tied)
    opt = VOGN(model, lr=0.01, num_data=50, init_precision=80.0)
    for _ in range(3):
        with opt.sampled_params():
            F.cross_entropy(model(torch.tensor([[1, 2], [3, 0], [4, 1]])), torch.tensor([0, 1, 0])).backward()
        opt.step()
        opt.zero_grad()
    drawn = (opt.posterior().sample(generator)["weight"] - model.weight.detach()).abs().amax(1)
    assert [row for row in range(5) if drawn[row] < 1e-10] == ([] if tied or padding is None else [padding])
