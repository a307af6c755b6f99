"""Parameters beside layers: at the functions that take them, they have the curvature of a loop over the examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes import VOGN
from lightning_bayes.curvature import measure
from lightning_bayes.curvature.fused import FusedEngine

WIDTH, LENGTH, CLASSES = 4, 3, 5


class Held(nn.Module):
    """Layers before and after a function of a parameter `p`."""

    def __init__(self, shape, use, **others):
        super().__init__()
        self.p, self.before, self.after = (
            nn.Parameter(torch.randn(shape)),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.use = use
        self.register_buffer("index", torch.tensor([2, 0, 1]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, x):  # [B, LENGTH, WIDTH]
        return self.after(self.use(self, self.before(x).tanh()).tanh()).mean(1)


def tokens(m, h):
    return torch.cat([m.p.expand(len(h), -1, -1), h], 1)


USES = {
    "a position embedding": ((1, LENGTH, WIDTH), lambda m, h: h + m.p),
    "its first rows": ((1, 9, WIDTH), lambda m, h: h + m.p[:, :LENGTH]),
    "its resized rows": (
        (1, WIDTH, 6),
        lambda m, h: h + F.interpolate(m.p, LENGTH, mode="linear", align_corners=False).transpose(1, 2),
    ),
    "without a dimension for examples": ((LENGTH, WIDTH), lambda m, h: m.p + h),
    "a class token": ((1, 1, WIDTH), tokens),
    "a repeated token": ((1, 1, WIDTH), lambda m, h: torch.cat([m.p.repeat(len(h), 1, 1), h], 1)),
    "an unbatched token": ((WIDTH,), lambda m, h: torch.cat([m.p.expand(len(h), 1, -1), h], 1)),
    "a gate": ((), lambda m, h: h + m.p.tanh() * h.square()),
    "a scale of features": ((WIDTH,), lambda m, h: h * m.p),
    "a mask token": ((1, 1, WIDTH), lambda m, h: torch.where(m.mask[None, :, None], m.p, h)),
    "a projection": ((WIDTH, WIDTH), lambda m, h: h @ m.p),
    "a linear function": ((WIDTH, WIDTH), lambda m, h: F.linear(h, m.p)),
    "a normalisation": ((WIDTH,), lambda m, h: F.layer_norm(h, (WIDTH,), m.p)),
    "a difference and a quotient": ((WIDTH,), lambda m, h: (h - m.p) / (1 + m.p.square())),
    "a table by a buffer": ((LENGTH, WIDTH), lambda m, h: h + m.p[m.index]),
    "a product of two expressions": ((LENGTH, WIDTH), lambda m, h: h * (m.p.softmax(0) * m.p.exp())),
    "two pieces": ((2 * WIDTH,), lambda m, h: h * m.p.chunk(2)[0] + m.p.chunk(2)[1]),
    "two uses": ((WIDTH,), lambda m, h: (h + m.p).tanh() * m.p),
    "by name": ((WIDTH,), lambda m, h: torch.mul(input=h, other=m.p)),
    "positions first": ((LENGTH, 1, WIDTH), lambda m, h: (h.transpose(0, 1) + m.p).transpose(0, 1)),
    "several rows": (
        (WIDTH,),
        lambda m, h: (torch.cat([h, h.square()], 1).flatten(0, 1) * m.p).unflatten(0, (len(h), -1)),
    ),
    "windows": ((1, 2, WIDTH // 2), lambda m, h: (h.reshape(-1, 2, WIDTH // 2) + m.p).reshape(h.shape)),
}
NOT_COVERED = {
    "an assignment": ((WIDTH,), lambda m, h: (y := h.clone(), y.__setitem__((slice(None), 0), m.p))[0]),
    "in place": ((WIDTH,), lambda m, h: h.clone().mul_(m.p)),
    "with a child's weight": ((WIDTH,), lambda m, h: F.linear(h, m.inner.weight, m.p)),
}


def run(engine, model, x, y):
    with engine.capture() as captured:
        loss = F.cross_entropy(model(x), y)
        captured.observe(loss)
        loss.backward()
    captured.close()
    found = captured.mean_curvature()
    pairs = list(zip(x.split(1), y.split(1), strict=True))
    expected = one_example_at_a_time(model, pairs, lambda m, pair: F.cross_entropy(m(pair[0]), pair[1]))[1]
    assert relative_error({name: found[p] for name, p in model.named_parameters() if p.requires_grad}, expected) < 1e-9
    model.zero_grad()
    return captured


def drawn(generator, n):
    x = torch.randn(n, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (n,), generator=generator)


@pytest.mark.parametrize("name", USES)
def test_a_use_equals_the_loop_and_leaves_the_layers_their_rules(name, generator):
    torch.manual_seed(0)
    model = Held(*USES[name]).double()
    engine = FusedEngine(model)
    for n in (
        6,
        LENGTH,
        2,
        *([] if name in {"positions first", "several rows", "windows"} else [1]),
    ):
        captured = run(engine, model, *drawn(generator, n))
        assert not captured.looped
        assert not captured.is_replanned
    assert {unit.name for unit in captured.plan.units} == {"", "before", "after"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NOT_COVERED)
def test_another_use_is_looped_once_and_then_measured_with_its_module(name, generator):
    torch.manual_seed(0)
    model = Held(*NOT_COVERED[name], inner=nn.Linear(WIDTH, WIDTH, bias=False)).double()
    engine = FusedEngine(model)
    model.inner.requires_grad_(name == "with a child's weight")
    for is_first in (True, False, False):
        captured = run(engine, model, *drawn(generator, 4))
        assert captured.is_replanned == bool(captured.looped) == is_first


class Around(nn.Module):
    """A checkpoint around a module."""

    def __init__(self, module):
        super().__init__()
        self.module, self.reentrant = module, None

    def forward(self, x):
        return self.module(x) if self.reentrant is None else checkpoint(self.module, x, use_reentrant=self.reentrant)


def test_a_module_under_a_checkpoint_is_measured(generator):
    torch.manual_seed(0)
    model, found = Around(Held(*USES["a scale of features"])).double(), []
    x, y = drawn(generator, 6)
    for model.reentrant in (None, False, True):
        found.append(measure(model, lambda: F.cross_entropy(model(x.requires_grad_()), y)).curvature)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_use_under_a_checkpoint_inside_of_its_module_is_looped(generator):
    torch.manual_seed(0)
    model = Held((WIDTH,), lambda m, h: checkpoint(lambda t: (t * m.p).tanh(), h, use_reentrant=False)).double()
    assert run(FusedEngine(model), model, *drawn(generator, 6)).looped == {model.p}


def test_a_lightning_module_and_a_container_hold_such_parameters(generator):
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.prompts = nn.Parameter(torch.randn(WIDTH)), nn.ParameterList([torch.randn(1, 1, WIDTH)])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.head(torch.cat([self.prompts[0].expand(len(x), -1, -1), x * self.scale], 1).tanh()).mean(1)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    torch.manual_seed(0)
    captured = run(FusedEngine(model := Step().double()), model, *drawn(generator, 5))
    assert not captured.looped


@pytest.mark.filterwarnings("error")
def test_a_transformer_with_positions_and_dropout_trains(generator):
    """Its whole forward would draw other noise in a second call."""

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.position, self.token = (
                nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH)),
                nn.Parameter(torch.zeros(1, 1, WIDTH)),
            )
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.3, batch_first=True)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
            return self.head(self.block(x)[:, 0])

    torch.manual_seed(0)
    model = Transformer()
    opt = VOGN(model, base=torch.optim.Adam(model.parameters(), lr=3e-2), num_data=8, curvature_interval=1)
    x, y = (t.float() if t.is_floating_point() else t for t in drawn(generator, 8))
    losses = []
    for _ in range(40):
        opt.zero_grad()
        with opt.sampled_params():
            (loss := F.cross_entropy(model(x), y)).backward()
        opt.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(bool((opt.state[p]["curvature"] > 0).any()) for p in (model.position, model.token))


def test_a_gradient_of_zero_shows_nothing_and_is_checked_when_one_arrives(generator):
    torch.manual_seed(0)
    model = Held((WIDTH,), lambda m, h: h + m.gate * (h @ m.mix).tanh() + 0 * m.p, gate=nn.Parameter(torch.zeros(())))
    model.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model, batch = model.double(), drawn(generator, 6)
    engine = FusedEngine(model)
    captured = run(engine, model, *batch)
    assert not captured.squares[model.mix].any()
    with torch.no_grad():
        model.gate.fill_(0.5)
    assert run(engine, model, *batch).squares[model.mix].any()


def test_a_frozen_parameter_is_not_watched(generator):
    torch.manual_seed(0)
    model = Held(*USES["a gate"]).double()
    model.p.requires_grad_(False)
    engine, (x, y) = FusedEngine(model), drawn(generator, 4)
    with engine.capture() as captured:
        captured.observe(loss := F.cross_entropy(model(x), y))
        loss.backward()
    captured.close()
    assert model.p not in captured.squares
