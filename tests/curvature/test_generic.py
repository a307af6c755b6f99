"""The generic rule: any module, example by example, in bounded memory and without side effects."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from random_matrices import normal
from torch import nn

from lightning_bayes.curvature import make_engine, measure
from lightning_bayes.curvature.rules import registry, replayed_call
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


def square_loss(model, example):
    return model(example[None]).square().mean()


def assert_equals_loop(model, x, **options):
    measured = measure(model, lambda: model(x).square().mean(), **options)
    assert_measures(measured, model, list(x), square_loss, 1e-10)


class Tokens(nn.Module):
    """Class token and position embedding as in a vision transformer: the gradient of one is a slice of the other's."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 4, 4))
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.mix(tokens.tanh()).sum(1)


class Alone(nn.Module):
    """A module without children, which the generic rule measures."""

    def __init__(self):
        super().__init__()
        self.position, self.mix = nn.Parameter(torch.ones(1, 3, 4)), nn.Parameter(torch.eye(4))

    def forward(self, x):
        return ((x + self.position).tanh() @ self.mix).sum(1)


class Recurrent(nn.Module):
    """LSTM with a given first state, whose examples lie in dimension 1 whatever `batch_first` says."""

    def __init__(self, batch_first):
        super().__init__()
        self.rnn = nn.LSTM(4, 3, num_layers=2, batch_first=batch_first)

    def forward(self, x):  # [B, 3, 4]
        state = x[:, 0, :3].expand(2, -1, -1).contiguous()
        output, (last, _) = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1), (state, state.tanh()))
        return output.sum(1 if self.rnn.batch_first else 0) + last[0]


class Masked(nn.Module):
    """Attention with a mask over positions, the same for all examples, and one over the keys of each example."""

    def __init__(self, batch_first):
        super().__init__()
        attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.attention = nn.utils.parametrizations.weight_norm(attention, "in_proj_weight")  # so no rule holds

    def forward(self, x):  # [B, 3, 4]
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        padding = torch.stack([x[:, 0, 0] > 2, x[:, 1, 0] > 0, x[:, 2, 0] > 0], 1)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        found = self.attention(x, x, x, padding, attn_mask=mask)[0]
        return found if self.attention.batch_first else found.transpose(0, 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])  # three is also the number of positions
@pytest.mark.parametrize(
    "build",
    [Tokens, *(lambda first=f, cls=c: cls(first) for c in (Recurrent, Masked) for f in (True, False))],
    ids=["tokens", "lstm batch first", "lstm", "attention batch first", "attention"],
)
def test_module_equals_the_loop(build, batch, generator):
    """The reduction is declared: two layers or three positions may look like a batch of as many examples."""
    assert_equals_loop(build().double(), normal(batch, 3, 4, generator=generator), loss_reduction="mean")


def cannot(*args, **kwargs):
    raise RuntimeError("no batching rule")


@pytest.mark.parametrize(("vectorised", "sizes"), [(True, {2, 1}), (False, {1})])
def test_memory_bound_changes_nothing(vectorised, sizes, generator, monkeypatch):
    model, x, held = Alone().double(), normal(5, 3, 4, generator=generator), []
    whole = measure(model, lambda: model(x).square().mean())

    def add_sums(total, name, part):
        held.append(len(part))
        registry.add_sums(total, name, part)

    monkeypatch.setattr(replayed_call, "add_sums", add_sums)
    if not vectorised:
        monkeypatch.setattr(torch, "vmap", cannot)
    two_examples = 2 * sum(4 * p.numel() for p in model.parameters()) / 2**20
    parts = measure(model, lambda: model(x).square().mean(), workspace_mib=two_examples)
    assert set(held) == sizes
    assert relative_error(parts.grad, whole.grad) < 1e-12
    assert relative_error(parts.curvature, whole.curvature) < 1e-12


def test_module_called_twice_equals_the_loop_in_parts(generator, monkeypatch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled = Scale(4)

        def forward(self, x):
            return self.scaled(self.scaled(x).tanh())

    monkeypatch.setattr(Workspace, "examples_at_once", lambda self, elements: 1)
    assert_equals_loop(Twice().double(), normal(5, 4, generator=generator))


class Scale(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return self.factor * x + self.shift


def test_gradient_of_the_input_is_not_overwritten(generator):
    """The shift's contribution is the very gradient that goes on to the input."""
    x = normal(5, 4, generator=generator).requires_grad_()
    model = Scale(4).double()
    truth = torch.autograd.grad(model(x).square().mean(), x)[0]
    measure(model, lambda: model(x).square().mean())
    torch.testing.assert_close(x.grad, truth)


class DropPath(nn.Module):
    """Noise that no module type gives away; it keeps a record of its draws."""

    def __init__(self):
        super().__init__()
        self.factor, self.draws = nn.Parameter(torch.ones(4)), []

    def forward(self, x):
        self.draws.append(torch.rand(len(x), 1, dtype=x.dtype))
        return self.factor * x * self.draws[-1]


def test_noise_of_any_kind_is_repeated(generator):
    model, x = DropPath().double(), normal(5, 4, generator=generator)
    kept = []

    def loss():
        out = model(x)
        kept.append((out / x).detach())  # the draws that made the loss, as the factor is one
        return out.square().mean()

    measured = measure(model, loss)
    after = torch.rand(1)
    each = 2 * x.square() * kept[0].square() / 4
    torch.testing.assert_close(measured.grad["factor"], each.mean(0))
    torch.testing.assert_close(measured.curvature["factor"], each.square().mean(0))
    torch.manual_seed(0)
    [torch.rand(1, 1, dtype=torch.float64) for _ in x]
    assert torch.equal(after, torch.rand(1))  # backward left the global generator where the forward did


def running_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True))


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.factor, self.inner = nn.Parameter(torch.ones(4)), inner

    def forward(self, x):
        return self.inner(self.factor * x)


@pytest.mark.parametrize(
    "build", [lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), running_norm], ids=["power", "running"]
)
def test_buffers_change_as_in_one_plain_forward(build, generator):
    model, x = Holder(build()).double(), normal(5, 4, generator=generator)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    loss = (model(x) ** 3).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    assert any(not torch.equal(value, start[name]) for name, value in truth.items())
    model.load_state_dict(start)
    measured = measure(model, lambda: (model(x) ** 3).mean())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, truth[name], rtol=0, atol=0)
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(measured.grad[name], grad)


def test_gradient_that_is_zero_but_for_rounding_is_accepted(generator):
    """A shift before a normalisation over the batch: terms of either sign that cancel."""
    model = nn.Sequential(Shift(4), nn.BatchNorm1d(4))
    x = torch.randn(6, 4, generator=generator)
    measured = measure(model, lambda: (model(x) ** 3).mean())
    assert (measured.grad["0.shift"].abs() < 1e-6).all()
    assert (measured.curvature["0.shift"] > 1e-4).all()


class Shift(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return x + self.shift


def test_half_precision_is_measured_in_single_precision(generator):
    layer, x = nn.Bilinear(3, 3, 2), torch.randn(4, 3, generator=generator).bfloat16()
    layer.bias.requires_grad_(False)  # a frozen parameter takes part in the replay
    half = nn.ModuleList([layer.bfloat16()])
    measured = measure(half, lambda: 1e-3 * half[0](x, x).square().mean())
    exact = nn.ModuleList([nn.Bilinear(3, 3, 2)])
    exact.load_state_dict(half.state_dict())
    exact[0].bias.requires_grad_(False)
    truth = measure(exact, lambda: 1e-3 * exact[0](x.float(), x.float()).square().mean())
    assert measured.curvature["0.weight"].dtype == torch.float32
    torch.testing.assert_close(measured.curvature["0.weight"], truth.curvature["0.weight"], rtol=0.05, atol=0)


class Shifted(nn.Module):
    """A generic unit: it holds a parameter directly."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + self.shift


def test_hooks_of_a_generic_unit_run_once(generator):
    model = nn.Sequential(Shifted(), nn.Linear(3, 2)).double()
    calls = []
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    model[0].register_forward_hook(lambda module, args, output: (calls.append(1), 2 * output)[1])
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    expected = model(x).square().mean()
    calls.clear()
    measured = measure(model, lambda: model(x).square().mean())
    torch.testing.assert_close(measured.loss, expected.detach())
    assert len(calls) == 1
    assert_measures(measured, model, list(x), lambda m, e: m(e[None]).square().mean(), 1e-10)


class Frequencies(nn.Module):
    """Returns complex numbers."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.fft.rfft(self.factor * x)


class Back(nn.Module):
    def forward(self, z):
        return torch.fft.irfft(z, n=4)


def test_complex_outputs_equal_the_loop(generator):
    model = nn.Sequential(nn.Linear(4, 4), Frequencies(), Back(), nn.Tanh(), nn.Linear(4, 3)).double()
    assert_equals_loop(model, normal(5, 4, generator=generator))


SHARED = {
    "row": torch.linspace(0, 1, 4).double()[None],
    "number": torch.tensor([0.5]).double(),
    "scalar": torch.tensor(0.5).double(),
}


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, position, x, mask):
        mixed = (x + position * self.cls)[:, None] * mask.sum(1, keepdim=True)
        return self.layer(mixed.tanh()).sum(1)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("position", SHARED.values(), ids=SHARED)
def test_an_input_that_all_examples_share_may_come_first(position, batch, generator):
    model, mask = Positions().double(), normal(7, 7, generator=generator)  # the mask has more rows than the batch
    x = normal(batch, 4, generator=generator)
    measured = measure(model, lambda: model(position, x, mask).square().mean())
    assert measured.num_examples == batch
    assert_measures(measured, model, list(x), lambda m, e: m(position, e[None], mask).square().mean(), 1e-10)


class Centred(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.factor, self.dropout = nn.Parameter(torch.ones(4)), dropout

    def forward(self, x):
        return F.dropout(self.factor * (x - x.mean(0)), self.dropout, self.training)


def test_a_batch_of_one_does_not_vouch_for_a_module_that_mixes(generator):
    model = nn.Sequential(nn.Linear(4, 4), Centred()).double()
    engine, x = make_engine("fused", model), normal(6, 4, generator=generator)
    with engine.capture():
        (model(x[:1]) + 1).square().mean().backward()
    with pytest.raises(ExampleDimensionError, match=r"Centred\.factor do not add up"), engine.capture():
        (model(x) + 1).square().mean().backward()


def test_a_module_with_noise_that_mixes_is_refused(generator):
    model, x = nn.Sequential(Centred(dropout=0.3)).double(), normal(6, 4, generator=generator)
    with pytest.raises(ExampleDimensionError, match=r"output of Centred for one example depends on the others"):
        measure(model, lambda: model(x).square().mean())


def test_the_check_of_a_module_with_noise_leaves_the_random_numbers_alone(generator):
    model, x = DropPath().double(), normal(5, 4, generator=generator)
    engine, after = make_engine("fused", model), []
    for _ in range(2):  # checked in the first pass only
        torch.manual_seed(0)
        with engine.capture():
            model(x).square().mean().backward()
        after.append(torch.rand(1))
    assert torch.equal(*after)


class Counting(nn.Module):
    """Its owner starts the count anew for each forward."""

    def __init__(self):
        super().__init__()
        self.factor, self.calls = nn.Parameter(torch.ones(4)), 0

    def forward(self, x):
        self.calls += 1
        return x * self.factor * (1 if self.calls == 1 else 2)


def test_a_state_outside_of_buffers_is_looped_or_refused(generator):
    model, x = nn.Sequential(nn.Linear(4, 4), Counting()).double(), normal(5, 4, generator=generator)
    plain = nn.Sequential(model[0], Scale(4)).double()

    def loss(model, x):
        return model(x).square().mean()

    with pytest.warns(UserWarning, match=r"^1\.factor: all examples share"):
        measured = measure(model, lambda: loss(model, x))
    square = one_example_at_a_time(plain, list(x.split(1)), loss)[1]
    assert relative_error(measured.curvature, {name: square[name] for name in measured.curvature}) < 1e-9
    model = nn.Sequential(model[0], Counting()).double()
    engine = make_engine("fused", model)
    with (
        pytest.raises(UnsupportedLayerError, match=r"Counting .* has state outside of its buffers"),
        engine.capture(),
    ):
        loss(model, x).backward()


@pytest.mark.parametrize("where", ["keyword", "dictionary"])
def test_packed_sequences_are_found_anywhere(where):
    class Reader(nn.GRU):
        def forward(self, x):
            return super().forward(x["x"] if isinstance(x, dict) else x)[1]

    model = nn.ModuleList([Reader(4, 3, batch_first=True)])
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 3, 4), torch.tensor([3, 2, 1]), batch_first=True)
    call = {"keyword": lambda: model[0](x=packed), "dictionary": lambda: model[0]({"x": packed})}[where]
    with pytest.raises(UnsupportedLayerError, match=r"Reader was called with a PackedSequence.*Pass padded sequences"):
        measure(model, lambda: call().square().mean())


def test_attention_masks_of_single_heads_are_refused_where_the_rule_does_not_hold(generator):
    attention = nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(4, 2, batch_first=True), "in_proj_weight")
    model, x = nn.ModuleList([attention]), torch.zeros(3, 5, 4)
    mask = torch.zeros(6, 5, 5, dtype=torch.bool)
    with pytest.raises(UnsupportedLayerError, match=r"attn_mask of shape \[6, 5, 5\].*key_padding_mask"):
        measure(model, lambda: model[0](x, x, x, attn_mask=mask)[0].square().mean())
