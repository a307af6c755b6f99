"""A prior centred at the initial weights, and posteriors over some of the parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VOGN
from lightning_bayes.optim.parameters import has_norms

STEP_RULES = ["natural", "trust_region"]


def fit(model, x, y, steps=10, **arguments):
    opt = VOGN(model, lr=0.1, num_data=100, init_precision=400.0, prior_precision=30.0, **arguments)
    train_on(opt, lambda: F.mse_loss(model(x), y), steps)
    return opt


def test_prior_at_the_initial_weights_is_a_prior_at_zero_of_their_change(generator):
    x, y = torch.randn(20, 3, generator=generator).double(), torch.randn(20, 1, generator=generator).double()
    start = torch.randn(1, 3, generator=generator).double()
    model, change = nn.Linear(3, 1, bias=False).double(), nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(start)
        change.weight.zero_()
    fit(model, x, y, prior_mean="initial")
    fit(change, x, y - x @ start.T)
    torch.testing.assert_close(model.weight - start, change.weight)


@pytest.mark.parametrize("step_rule", STEP_RULES)
def test_without_data_weights_return_to_the_prior_mean(step_rule):
    model = nn.Linear(3, 1)
    opt = VOGN(model, lr=0.1, betas=(0.0, 0.9), num_data=1, prior_mean="initial", step_rule=step_rule)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    train_on(opt, lambda: 0.0 * model(torch.zeros(4, 3)).mean(), 400)
    end = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(end, start, atol=1e-2, rtol=0)


def test_kl_is_taken_from_the_prior_mean(generator):
    model = nn.Linear(3, 1)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    x, y = torch.randn(20, 3, generator=generator), torch.randn(20, 1, generator=generator)
    q = fit(model, x, y, prior_mean="initial").posterior()
    expected = sum(kl_divergence(Normal(q.mean[n], q.std[n]), Normal(start[n], 30.0**-0.5)).sum() for n in q.mean)
    torch.testing.assert_close(q.kl(), expected)
    assert torch.equal(type(q).from_state_dict(q.state_dict()).prior_mean["weight"], start["weight"])


def test_only_matching_parameters_are_bayesian(generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x, y = torch.randn(20, 3, generator=generator), torch.randn(20, 1, generator=generator)
    before = model[0].weight.detach().clone()
    opt = fit(model, x, y, bayesian=r"^2\.")
    assert sorted(opt.posterior().mean) == ["2.bias", "2.weight"]
    assert "0.weight" in opt.posterior().constants
    assert not torch.equal(model[0].weight, before)  # deterministic parameters are trained too
    mean = {name: param.detach().clone() for name, param in model.named_parameters()}
    with opt.sampled_params(), torch.no_grad():
        moved = {name for name, param in model.named_parameters() if not torch.equal(param, mean[name])}
    assert moved == {"2.weight", "2.bias"}


def test_bad_arguments_are_named():
    with pytest.raises(
        HyperparameterError, match=r"bayesian='head' matches none of the trainable parameters weight, bias"
    ):
        VOGN(nn.Linear(1, 1), bayesian="head")
    with pytest.raises(HyperparameterError, match=r"bayesian='\(' is not a regular expression"):
        VOGN(nn.Linear(1, 1), bayesian="(")
    with pytest.raises(HyperparameterError, match="bayesian=3 is not a regular expression"):
        VOGN(nn.Linear(1, 1), bayesian=3)
    with pytest.raises(HyperparameterError, match="prior_mean='origin' must be 'zero' or 'initial'"):
        VOGN(nn.Linear(1, 1), prior_mean="origin")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lr": 1e-2}, {"0.weight", "1.weight", "1.bias", "3.weight"}),
        ({"step_rule": "trust_region"}, {"0.weight", "3.weight"}),
        ({"step_rule": "trust_region", "bayesian": "."}, {"0.weight", "1.weight", "1.bias", "3.weight"}),
    ],
    ids=["natural", "bounded", "by name"],
)
def test_normalisation_layers_are_points_where_the_noise_is_a_heuristic(arguments, expected):
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 1, bias=False))
    assert VOGN(model, num_data=10, init_precision=20.0, **arguments).posterior().mean.keys() == expected


class RootMeanSquare(nn.Module):
    """RMSNorm as language models write it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Channels(nn.Module):
    """A normalisation over channels, as in convolutional networks; its weights start at zero and count from one."""

    def __init__(self, size):
        super().__init__()
        self.gamma, self.bias = (nn.Parameter(torch.zeros(1, size, 1, 1)) for _ in range(2))

    def forward(self, x):
        return (1 + self.gamma) * (x - x.mean(1, True)) / x.std(1, keepdim=True) + self.bias


class Scale(nn.Module):
    """Weights of the size of a normalisation's."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x


class Constant(Scale):
    def forward(self, x):
        return self.weight + torch.zeros_like(x)


@pytest.mark.parametrize(
    ("layer", "is_norm"),
    [
        (RootMeanSquare(3), True),
        (Channels(3), True),
        (nn.LayerNorm(3), True),
        (Scale(3), False),
        (Constant(3), False),
        (nn.PReLU(3), False),
        (nn.Linear(3, 1), False),
        (nn.Embedding(3, 1), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_normalisation_layer_is_known_by_the_scale_that_its_outputs_ignore(layer, is_norm):
    model = nn.Sequential(nn.Linear(2, 3, bias=False), layer)
    random = torch.get_rng_state()
    opt = VOGN(model, num_data=10, init_precision=20.0, step_rule="trust_region")
    assert ("1.weight" in opt.posterior().mean or "1.gamma" in opt.posterior().mean) is not is_norm
    assert has_norms(model) is is_norm
    assert torch.equal(torch.get_rng_state(), random)


def test_normalisation_layers_that_are_all_there_is_keep_their_noise():
    model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.BatchNorm1d(3))
    opt = VOGN(model, num_data=10, init_precision=20.0, step_rule="trust_region")
    assert opt.posterior().mean.keys() == {"1.weight", "1.bias"}


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_parameters_without_a_posterior_are_neither_measured_nor_stored(engine, generator, monkeypatch):
    """The user's optimizer updates all parameters; the last layer has the squares of a model measured as a whole."""
    x, y = torch.randn(20, 3, generator=generator), torch.randint(2, (20,), generator=generator)
    found, watch = [], HookedCapture.watch
    for arguments in ({"bayesian": r"^2\."}, {}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = VOGN(model, base=base, num_data=100, engine=engine, **arguments)
        watched = []
        monkeypatch.setattr(
            HookedCapture, "watch", lambda self, unit, undo, to=watched: (to.append(unit.name), watch(self, unit, undo))
        )
        with opt.sampled_params():
            F.cross_entropy(model(x), y).backward()
        opt.step()
        found.append((watched, {name: dict(opt.state[p]) for name, p in model.named_parameters()}, opt.posterior()))
    (part, states, posterior), (whole, every, _) = found
    assert (part, whole) == (["2"], ["0", "2"])
    assert sorted(posterior.mean) == ["2.bias", "2.weight"]
    assert "curvature" not in states["0.weight"]
    assert sum(value.numel() for value in states["0.weight"].values() if isinstance(value, torch.Tensor)) == 1
    torch.testing.assert_close(states["2.weight"]["curvature"], every["2.weight"]["curvature"])
