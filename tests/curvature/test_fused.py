"""The fused engine's stand-in for forwards: modes, passes without gradients, copies, second derivatives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from random_matrices import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes.curvature import make_engine, measure
from lightning_bayes.curvature.rules import LayerRule
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.optim import IVON, VOGN, NoisyKFAC


def loop(model, x):
    plain = copy.deepcopy(model)
    plain.reentrant = False  # a reentrant checkpoint works in .backward() only
    return one_example_at_a_time(plain, list(x), lambda m, e: m(e[None]).square().mean())


def assert_equals_loop(model, x, engine="fused"):
    grad, square = loop(model, x)
    measured = measure(model, lambda: model(x).square().mean(), engine=engine)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


class InMode(nn.Module):
    """Runs a layer in evaluation mode and leaves it in training mode before backward."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        self.layers.eval()
        out = self.layers(x)
        self.layers.train()
        return out


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.dropout = nn.Parameter(torch.ones(4)), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.factor * x)


NORM = nn.BatchNorm1d
LAYERS = {
    "batch norm": lambda: [nn.Linear(4, 4), NORM(4), nn.Tanh()],
    "shared batch norm": lambda: [norm := NORM(4), nn.Tanh(), norm],
    "instance norm": lambda: [
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Tanh(),
    ],
    "generic": lambda: [Noisy()],
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "fused") for name in LAYERS), ("batch norm", "backpack"), ("instance norm", "backpack")],
)
def test_mode_is_that_of_the_forward(name, engine, generator):
    model = InMode(*LAYERS[name]()).double()
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    assert_equals_loop(model, normal(5, 4, generator=generator), engine)
    assert all(module.training for module in model.layers.modules())


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def cannot(*args, **kwargs):
    raise AssertionError("every example's contribution was asked for")


class Repeated(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x):
        hidden = self.first(x)
        return self.last(checkpoint(lambda h: self.layer(h).tanh(), hidden, use_reentrant=self.reentrant))


@pytest.mark.parametrize(
    "build", [mlp, lambda: Repeated(True), lambda: Repeated(False)], ids=["plain", "reentrant", "not reentrant"]
)
def test_calls_without_gradients_and_repeated_ones_cost_no_memory(build, generator, monkeypatch):
    """The contributions of all examples are kept only where a parameter has several calls with gradients."""
    model, x = build().double(), normal(5, 4, generator=generator)
    grad, square = loop(model, x)

    def loss():
        with torch.no_grad():
            for layer in model.children():
                layer(torch.ones(2, layer.in_features).double() if isinstance(layer, nn.Linear) else x)
        return model(x).square().mean()

    monkeypatch.setattr(LayerRule, "__call__", cannot)
    measured = measure(model, loss)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


class Mixed(nn.Module):
    """One layer inside of a checkpoint, and outside, and in a second checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x):
        hidden = checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant).tanh()
        return checkpoint(self.layer, self.layer(hidden).tanh(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_share_a_layer_equal_the_loop(reentrant, generator):
    assert_equals_loop(Mixed(reentrant).double(), normal(5, 4, generator=generator))


@pytest.mark.parametrize("method", [VOGN, NoisyKFAC, IVON])
def test_copies_made_inside_a_pass_are_models_of_their_own(method, generator):
    model, x = mlp(), normal(5, 4, generator=generator)
    optimizer = method(model, lr=0.1, num_data=10, init_precision=10.0)
    with optimizer.sampled_params():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = model(x).detach()
        model(x).square().mean().backward()
    optimizer.step()
    for copied in copies:
        torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)
        assert_equals_loop(copied, x)
        assert_equals_loop(copied, x, engine="backpack")
        for param in copied.parameters():
            param.data.zero_()
        assert not copied(x).any()


def test_a_copy_keeps_the_rules(monkeypatch, generator):
    model, x = mlp(), normal(5, 4, generator=generator)
    engine = make_engine("fused", model)
    with engine.capture():
        copied = copy.deepcopy(model)
    monkeypatch.setattr("lightning_bayes.curvature.layer_calls.GenericCall.watch", cannot)
    assert_equals_loop(copied, x)


def penalized(model, x):
    inputs = x.clone().requires_grad_()
    out = model(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return out.square().mean() + slope.square().sum(1).mean()


@pytest.mark.filterwarnings("ignore:.*needs one backward pass for each of the:UserWarning")
def test_gradient_penalty_equals_the_loop(generator):
    model, x = mlp(), normal(5, 4, generator=generator)
    measured = measure(model, lambda: penalized(model, x))
    assert_measures(measured, model, list(x.split(1)), penalized, 1e-9)


def test_gradient_with_a_graph_that_nobody_differentiates_is_right(generator):
    model, x = mlp(), normal(5, 4, generator=generator)

    def loss():
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        assert slope.any()
        return (model(x) + 1).square().mean()

    measured = measure(model, loss)
    assert_measures(measured, model, list(x), lambda m, e: (m(e[None]) + 1).square().mean(), 1e-10)


def test_transforms_of_functions_are_refused(generator):
    model, x = mlp(), normal(5, 4, generator=generator)
    with pytest.raises(UnsupportedTrainingError, match=r"0 \(Linear\) is called under a transform of torch\.func"):
        measure(model, lambda: torch.func.jacrev(lambda z: model(z[None])[0])(x[0]).square().sum())


class UsedOutside(nn.Module):
    """The last layer's weight is used once more, outside of its forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x):
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.last(hidden.tanh()) + F.linear(hidden, self.last.weight)


def test_a_use_outside_of_a_layer_is_refused_where_backward_runs_only_once(generator):
    x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 4, (6,), generator=generator)
    model = UsedOutside(reentrant=True)
    with pytest.raises(UnsupportedLayerError, match=r"^last\.weight: the contributions.*Pass use_reentrant=False"):
        measure(model, lambda: F.cross_entropy(model(x), y))
    model.reentrant = False
    with pytest.warns(UserWarning, match=r"last\.weight.*one backward pass for each of the 6 examples"):
        measured = measure(model, lambda: F.cross_entropy(model(x), y))
    rows = x.detach()
    assert_measures(measured, model, list(range(6)), lambda m, i: F.cross_entropy(m(rows[[i]]), y[[i]]), 1e-5)
