"""Layers that hold the examples elsewhere than in the rows of dimension 0, and parameters that no layer holds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import make_engine, measure
from lightning_bayes.errors import BayesError, UnsupportedTrainingError

SIZES = [(4, 4), (4, 6), (8, 4), (4, 8)]  # examples and positions: equal, prime to each other, multiples
pytestmark = pytest.mark.filterwarnings("ignore:.*all examples share these:UserWarning")


class Positions(nn.Module):
    """nanoGPT: token embeddings, one table of positions for all examples, an attention block, a head."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(7, 8), nn.Embedding(9, 8), nn.Linear(8, 7)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x):
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(hidden)
        if self.batch_first:
            return self.head(self.block(hidden, mask))
        return self.head(self.block(hidden.transpose(0, 1), mask)).transpose(0, 1)


class Relative(nn.Module):
    """T5: a table of biases by distance, one for all examples, in the attention of each."""

    def __init__(self):
        super().__init__()
        self.tokens, self.bias, self.query, self.head = (
            nn.Embedding(7, 8),
            nn.Embedding(17, 2),
            nn.Linear(8, 8),
            nn.Linear(8, 7),
        )

    def forward(self, x):
        hidden, places = self.tokens(x), torch.arange(x.shape[1])
        bias = self.bias(places[:, None] - places + 8).permute(2, 0, 1)[None]
        heads = self.query(hidden).unflatten(2, (2, 4)).transpose(1, 2)
        mixed = (heads @ heads.mT + bias).softmax(-1) @ heads
        return self.head(mixed.transpose(1, 2).flatten(2))


class SequenceFirst(nn.Module):
    """All layers have the time in dimension 0, and the output is turned back."""

    def __init__(self, body):
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(7, 8), body, nn.Linear(8, 7)

    def forward(self, x):
        hidden = self.body(self.tokens(x.t()))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden.tanh()).transpose(0, 1)


class Tied(nn.Module):
    """The embedding's weight is the output layer's too, by hand."""

    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(7, 5), nn.Linear(5, 5)

    def forward(self, x):
        return F.linear(self.body(self.tokens(x)).tanh(), self.tokens.weight)


class RowsOfExamples(nn.Module):
    """Layers that see the positions of all examples as rows: experts, patches, time-distributed layers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.conv, self.head = (
            nn.Embedding(7, 8),
            nn.LayerNorm(8),
            nn.Conv1d(2, 3, 3, padding=1),
            nn.Linear(12, 7),
        )

    def forward(self, x):
        rows = self.norm(self.tokens(x.flatten()))
        return self.head(self.conv(rows.view(-1, 2, 4)).flatten(1)).view(*x.shape, -1)


MODELS = {
    "positions": Positions,
    "positions, sequence first": partial(Positions, batch_first=False),
    "relative": Relative,
    "linear, sequence first": lambda: SequenceFirst(nn.Linear(8, 8)),
    "recurrent, sequence first": lambda: SequenceFirst(nn.LSTM(8, 8)),
    "tied": Tied,
    "rows": RowsOfExamples,
}


def of_tokens(model, example):
    return F.cross_entropy(model(example[0]).flatten(0, 1), example[1].flatten())


def drawn(examples, positions, generator):
    return [torch.randint(0, 7, (examples, positions), generator=generator) for _ in range(2)]


def assert_equals_the_loop(model, batch, loss, **options):
    measured = measure(model, lambda: loss(model, batch), **options)
    assert measured.num_examples == len(batch[0])
    assert_measures(measured, model, list(zip(*(t.split(1) for t in batch), strict=True)), loss, 1e-9)


@pytest.mark.parametrize(("examples", "positions"), SIZES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_any_layout_equals_the_loop(engine, name, examples, positions, generator):
    model, batch = MODELS[name]().double(), drawn(examples, positions, generator)
    assert_equals_the_loop(model, batch, of_tokens, engine=engine)


@pytest.mark.parametrize(("examples", "positions"), SIZES)
def test_a_mean_over_positions_in_dimension_zero(examples, positions, generator):
    model, batch = SequenceFirst(nn.Linear(8, 8)).double(), drawn(examples, positions, generator)
    pooled = lambda m, e: F.cross_entropy(m(e[0]).mean(1), e[1][:, 0])  # noqa: E731
    assert_equals_the_loop(model, batch, pooled)


PAIRS = {  # of a network and pairs, both through one call
    "halves": lambda net, a, b: net(torch.cat([a, b])).chunk(2),
    "slices": lambda net, a, b: (lambda out: (out[: len(a)], out[len(a) :]))(net(torch.cat([a, b]))),
    "one after the other": lambda net, a, b: net(torch.stack([a, b], 1).flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1),
    "thirds": lambda net, a, b: net(torch.cat([a, b, a + b])).split(len(a))[:2],
}


@pytest.mark.parametrize("examples", [3, 4, 6])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_only_the_loss_brings_together(name, examples, generator):
    """No layer sees as many rows as there are examples, and the loss takes chosen rows: its reduction is declared."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh()).double()
    batch = [torch.randn(examples, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    target = torch.arange(examples) % 2 * 2 - 1

    def contrast(net, pair):
        return F.cosine_embedding_loss(*PAIRS[name](net, *pair[:2]), pair[2])

    assert_equals_the_loop(net, [*batch, target], contrast, loss_reduction="mean")


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_siamese_recurrent_networks(kind, batch_first, has_states, generator):
    model = nn.ModuleDict({"rnn": kind(3, 5, batch_first=batch_first), "head": nn.Linear(5, 2)}).double()

    def contrast(model, pair):
        x = torch.cat(pair[:2])
        states = torch.cat(pair[2:4])[None] if has_states else None
        states = (states, states / 2) if has_states and kind is nn.LSTM else states
        last = model["rnn"](x if batch_first else x.transpose(0, 1), states)[1]
        first, second = (last[0] if kind is nn.LSTM else last)[-1].chunk(2)
        return F.cross_entropy(model["head"]((first - second).abs()), pair[4])

    shapes = [(4, 6, 3), (4, 6, 3), (4, 5), (4, 5)]
    batch = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    assert_equals_the_loop(model, [*batch, torch.tensor([0, 1, 1, 0])], contrast)


def test_siamese_attention_repeats_the_dropout_of_the_forward(generator):
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(4, 3)}).double()
    pairs = [torch.randn(5, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2)]

    def losses():
        torch.manual_seed(0)
        x = torch.cat(pairs)
        first, second = model["head"](model["attention"](x, x, x)[0].mean(1)).chunk(2)
        return F.cosine_embedding_loss(first, second, torch.tensor([1, -1, 1, -1, 1]), reduction="none")

    params = dict(model.named_parameters())
    per_example = [torch.autograd.grad(loss, list(params.values()), retain_graph=True) for loss in losses()]
    grads = dict(zip(params, map(torch.stack, zip(*per_example, strict=True)), strict=True))
    measured = measure(model, lambda: losses().mean(), loss_reduction="mean")  # chosen rows: declared
    assert relative_error(measured.grad, {name: grad.mean(0) for name, grad in grads.items()}) < 1e-9
    assert relative_error(measured.curvature, {name: grad.square().mean(0) for name, grad in grads.items()}) < 1e-9


class Experts(nn.Module):
    """Rows go to the expert that a gate chooses, by a mask or by numbers."""

    def __init__(self, by_mask, by_token):
        super().__init__()
        self.by_mask, self.by_token = by_mask, by_token
        self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        rows = x.flatten(0, 1) if self.by_token else x.mean(1)
        share = self.gate(rows).softmax(1)
        out = rows.new_zeros(len(rows), 4)
        for k, expert in enumerate(self.experts):
            is_chosen = share.argmax(1) == k
            numbers = is_chosen.nonzero()[:, 0]
            found = expert(rows[numbers]) * share[numbers, k, None]
            if self.by_mask:
                out[is_chosen] = found
            else:
                out = out.index_add(0, numbers, found)
        return self.head(out.unflatten(0, x.shape[:2]).mean(1) if self.by_token else out)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize("examples", [4, 5])
def test_experts(examples, by_mask, by_token, generator):
    model = Experts(by_mask, by_token).double()
    x = torch.randn(examples, 5, 3, generator=generator, dtype=torch.float64)
    assert_equals_the_loop(model, [x, torch.arange(examples) % 4], lambda m, e: F.cross_entropy(m(e[0]), e[1]))


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_pieces_that_are_no_pairs_are_not_taken_for_examples(weight, generator):
    """Three labelled examples, then three others."""
    net = nn.Linear(3, 4).double()
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)

    def loss():
        labelled, rest = net(x).chunk(2)
        return F.cross_entropy(labelled, torch.arange(3)) + weight * rest.square().mean()

    with pytest.raises(UnsupportedTrainingError, match="per_example_loss"):
        measure(net, loss)


@pytest.mark.parametrize("length", [4, 5])
def test_masks_of_heads_and_examples(length, generator):
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(6, 2, batch_first=True), "head": nn.Linear(6, 3)}
    ).double()
    x = torch.randn(4, length, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 2, length, length, generator=generator) < 0.3) & ~torch.eye(length, dtype=torch.bool)

    def loss(model, example):
        x, mask, y = example
        seen = model["attention"](x, x, x, attn_mask=mask.flatten(0, 1))[0]
        return F.cross_entropy(model["head"](seen.mean(1)), y)

    assert_equals_the_loop(model, [x, mask, torch.arange(4) % 3], loss)


class Heteroscedastic(nn.Module):
    """A LightningModule's own parameter."""

    def __init__(self):
        super().__init__()
        self.body, self.log_sigma = nn.Linear(3, 1), nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch, inside=True):
        errors = (self.body(batch[0]) - batch[1]).square() * torch.exp(-2 * self.log_sigma) / 2
        return (errors + self.log_sigma).mean() if inside else errors.mean() + self.log_sigma


@pytest.mark.parametrize("examples", [1, 2, 5])
def test_parameters_of_the_module_itself(examples, generator):
    model = Heteroscedastic().double()
    batch = [torch.randn(examples, size, generator=generator, dtype=torch.float64) for size in (3, 1)]
    assert_equals_the_loop(model, batch, Heteroscedastic.training_step)


def test_two_losses_that_use_a_weight_outside_of_its_layer_are_added_first(generator):
    model, views = Tied().double(), [torch.randint(0, 7, (5, 3), generator=generator) for _ in range(2)]

    def loss(model, x):
        return model(x).square().mean()

    pairs = list(zip(*views, strict=True))
    square = one_example_at_a_time(model, pairs, lambda m, pair: sum(loss(m, x[None]) for x in pair))[1]
    engine = make_engine("fused", model)
    with engine.capture() as captured:
        total = sum(loss(model, x) for x in views)
        captured.observe(total)
        total.backward()
    captured.close()
    found = captured.mean_curvature()
    assert relative_error({name: found[p] for name, p in model.named_parameters()}, square) < 1e-10

    def two_backwards():
        with engine.capture() as captured:
            losses = [loss(model, x) for x in views]
            for value in losses:
                captured.observe(value)
            for value in losses:
                value.backward()

    with pytest.raises(UnsupportedTrainingError, match=r"^A second loss of one pass reached .*Add the losses"):
        two_backwards()


def test_a_term_that_no_example_enters_is_asked_for(generator):
    model = Heteroscedastic().double()
    batch = [torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (3, 1)]
    with pytest.raises(UnsupportedTrainingError, match=r"^log_sigma is in a term .*\.mean\(\)"):
        measure(model, lambda: model.training_step(batch, inside=False))


def test_examples_that_compare_with_one_another_have_the_gradients_of_their_own_rows(generator):
    towers = nn.ModuleList(nn.Linear(3, 5) for _ in range(2)).double()
    x, y = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))

    def loss(towers, rows=slice(None)):
        return F.cross_entropy((towers[0](x) @ towers[1](y).t())[rows], torch.arange(4)[rows])

    measured = measure(towers, lambda: loss(towers))
    _, square = one_example_at_a_time(towers, list(range(4)), lambda m, i: loss(m, [i]))
    assert relative_error(measured.curvature, square) < 1e-9


def test_batch_norm_mixes_lawfully_and_attention_over_the_batch_does_not(generator):
    x, y = torch.randn(6, 4, generator=generator), torch.arange(6) % 3
    measure(
        normed := nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        lambda: F.cross_entropy(normed(x), y),
    )

    class Mixing(nn.Sequential):
        def forward(self, x):
            hidden = self[0](x)
            return self[1]((hidden @ hidden.t()).softmax(1) @ hidden)

    mixing = Mixing(nn.Linear(4, 5), nn.Linear(5, 3))
    for engine in ("fused", "backpack"):
        with pytest.raises(BayesError, match="does not keep the examples apart"):
            measure(mixing, lambda: F.cross_entropy(mixing(x), y), engine=engine)


def test_the_probe_runs_once_for_each_kind_of_pass(generator, monkeypatch):
    from lightning_bayes.curvature.fused import FusedEngine
    from lightning_bayes.curvature.single_examples import SingleExamples

    counted = []
    monkeypatch.setattr(
        SingleExamples, "of_batch", lambda self, f=SingleExamples.of_batch: counted.append(1) or f(self)
    )
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    engine = FusedEngine(model)
    for examples in (6, 7, 6, 9, 5):  # 5 rows of 5 features may be a coincidence
        with engine.capture() as captured:
            loss = F.cross_entropy(model(torch.randn(examples, 4, generator=generator)), torch.arange(examples) % 3)
            captured.observe(loss)
            loss.backward()
    assert len(counted) == 2 * 4  # two kinds; the whole batch, and three bits of the numbers of 5 or 6 examples


def test_probe_and_loop_leave_retained_gradients_of_outputs_alone(generator):
    model = nn.ModuleDict({"table": nn.Embedding(3, 3), "layer": nn.Linear(3, 3)})
    x, kept = torch.randn(4, 3, generator=generator), []

    def loss():
        kept.append(model["layer"](x + model["table"](torch.tensor([1]))))
        kept[-1].retain_grad()
        return kept[-1].square().mean()

    with pytest.warns(UserWarning, match=r"^table\.weight: all examples share"):
        measure(model, loss)
    torch.testing.assert_close(kept[0].grad, kept[0].detach() / 6)
