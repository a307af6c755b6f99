"""`measure` leaves every model as it was, whatever its modules do and whatever is raised on the way."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


class RegisteredTwice(nn.Module):
    """As timm's CoaT: one submodule under two names, in a module with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.cpe, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.block = nn.Sequential(self.cpe, nn.Tanh())

    def forward(self, x):
        return self.block(x) * self.scale


class SharedBackbone(nn.Module):
    """As under BackboneFinetuning: one submodule under two parents, each of which is walked through."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.net = nn.Sequential(self.backbone, nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x):
        return self.net(x)


class SharedTensors(nn.Module):
    """One parameter and one buffer under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight, self.scale = self.first.weight, nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("again", self.shift)

    def forward(self, x):
        return self.second(self.first(x).tanh()) * self.scale + self.shift + self.again


class Recurrent(nn.Module):
    """An LSTM keeps its own list of its weights."""

    def __init__(self):
        super().__init__()
        self.rnn, self.scale = nn.LSTM(4, 4, batch_first=True), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.rnn(x.unsqueeze(1))[0].squeeze(1) * self.scale


class Assigning(nn.Module):
    """Remembers what it computed, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.calls, self.last = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.linear(x).detach()
        return self.linear(x) * self.scale


class Noisy(RegisteredTwice):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class OldWeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.utils.weight_norm(nn.Linear(4, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.linear(x) * self.scale


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(1)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(1)


MODELS = [RegisteredTwice, SharedBackbone, SharedTensors, Recurrent, Assigning, Noisy, OldWeightNorm, Attends]
every_model = pytest.mark.parametrize("build", MODELS)


def traces(model):
    """Everything that a module holds: the very same objects before and after."""
    return {
        (name, where, key): value
        for name, module in model.named_modules(remove_duplicate=False)
        for where, slots in (("", vars(module)), ("parameter", module._parameters), ("buffer", module._buffers))
        for key, value in slots.items()
        if where or not key.startswith("_") or key in {"_flat_weights", "_forward_hooks", "_forward_pre_hooks"}
    }


def tensors(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, before, values, own=()):
    after = traces(model)
    assert after.keys() == before.keys()
    assert not [key for key in after if after[key] is not before[key] and key[2] not in own]
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@every_model
def test_a_model_is_left_as_it_was(build, generator):
    model, x = build().double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    before, values = traces(model), tensors(model)
    measured = measure(model, lambda: model(x).square().mean())
    assert_unchanged(model, before, values, own={"calls", "last", "weight"})
    assert getattr(model, "calls", 1) == 1  # as its owner called it
    if build is not OldWeightNorm:  # which torch itself cannot copy
        copy.deepcopy(model)
    assert all(name in measured.curvature for name, _ in model.named_parameters())


@pytest.mark.parametrize("build", [m for m in MODELS if m is not Noisy])
def test_the_figures_are_those_of_the_loop(build, generator):
    model, x = build().double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    grad, square = one_example_at_a_time(model, list(x), lambda m, e: m(e[None]).square().mean())
    for _ in range(2):
        measured = measure(model, lambda: model(x).square().mean())
        assert relative_error(measured.grad, grad) < 1e-10
        assert relative_error(measured.curvature, square) < 1e-10


class StopHereError(Exception):
    pass


def raising_at(call, monkeypatch, method):
    """Let `torch.tanh`-like work go on until the `call`-th use of `method`, then raise."""
    original, count = getattr(torch.Tensor, method), 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call:
            raise StopHereError
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, method, counted)


@every_model
@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_a_model_is_left_as_it_was_after_an_exception_in_the_loss(build, engine, generator):
    model, x = build().double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    before, values = traces(model), tensors(model)

    def loss():
        model(x)
        raise StopHereError

    with pytest.raises((StopHereError, UnsupportedLayerError)):  # BackPACK has no rule for most of them
        measure(model, loss, engine=engine)
    assert_unchanged(model, before, values, own={"calls", "last", "weight"})


@pytest.mark.parametrize("build", [m for m in MODELS if m is not Attends])
@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_a_model_is_left_as_it_was_after_an_exception_anywhere(build, call, generator, monkeypatch):
    """Any product may be the last one: in the forward, in a replay of one example, in the check of the sums."""
    model, x = build().double(), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    before, values = traces(model), tensors(model)
    with monkeypatch.context() as patched, contextlib.suppress(StopHereError):
        raising_at(call, patched, "__mul__")
        measure(model, lambda: model(x).square().mean())
    assert_unchanged(model, before, values, own={"calls", "last", "weight"})
