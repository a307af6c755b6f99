"""Packed sequences and bags of indices: against one example at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from lightning_bayes import IVON
from lightning_bayes.curvature import make_engine, measure
from lightning_bayes.errors import UnsupportedLayerError

LENGTHS = (3, 6, 1, 3, 5)


class Recurrent(nn.Module):
    """Reads the last states, the outputs or both; `twice` runs the layer once more."""

    def __init__(self, kind, twice=False, **options):
        super().__init__()
        self.rnn, self.twice = kind(4, 5, **options), twice
        width = (1 + self.rnn.bidirectional) * (self.rnn.proj_size or 5)
        self.head, self.tagger = nn.Linear(self.rnn.proj_size or 5, 3), nn.Linear(width, 2, bias=False)

    def forward(self, sequences, states):
        packed = pack_sequence(sequences, enforce_sorted=False)
        outputs, last = self.rnn(packed, states)
        last = last[0] if isinstance(last, tuple) else last
        if self.twice:
            last = last + self.rnn(packed)[1][0]
        return self.head(last[-1] + last[0]), self.tagger(pad_packed_sequence(outputs, batch_first=True)[0])


KINDS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM with everything": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True, "proj_size": 3}),
    "LSTM twice": (nn.LSTM, {"twice": True, "bidirectional": True}),
    "GRU": (nn.GRU, {"num_layers": 2, "batch_first": True}),
    "RNN": (nn.RNN, {"bidirectional": True, "nonlinearity": "relu"}),
}


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_packed_sequences_equal_the_loop(name, has_states, generator):
    kind, options = KINDS[name]
    model = Recurrent(kind, **options).double()
    sequences = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in LENGTHS]
    count = model.rnn.num_layers * (1 + model.rnn.bidirectional)
    sizes = (model.rnn.proj_size or 5, 5) if kind is nn.LSTM else (5,)
    first = [torch.randn(count, 5, size, generator=generator, dtype=torch.float64) for size in sizes]
    y = torch.arange(5) % 3

    def loss(model, rows):
        states = (
            tuple(state[:, rows].contiguous() for state in first) if kind is nn.LSTM else first[0][:, rows].contiguous()
        )
        logits, tags = model([sequences[i] for i in rows], states if has_states else None)
        return F.cross_entropy(logits, y[rows]) + tags.square().sum((1, 2)).mean()

    measured = measure(model, lambda: loss(model, list(range(5))))
    assert measured.num_examples == 5
    assert_measures(measured, model, [[i] for i in range(5)], loss, 1e-10)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "proj_size": 3}], ids=str)
def test_final_cells_of_packed_sequences_equal_the_loop(options, generator):
    layer = nn.LSTM(4, 5, **options).double()
    sequences = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in LENGTHS]

    def loss(layer, rows):
        _, (hidden, cells) = layer(pack_sequence([sequences[i] for i in rows], enforce_sorted=False))
        return (hidden.square().sum((0, 2)) + cells.square().sum((0, 2))).mean()

    measured = measure(layer, lambda: loss(layer, list(range(5))))
    assert_measures(measured, layer, [[i] for i in range(5)], loss, 1e-10)


def test_packed_sequences_are_counted_by_methods_that_measure_no_examples(generator):
    layer = nn.GRU(4, 3)
    packed = pack_sequence([torch.randn(length, 4, generator=generator) for length in LENGTHS], enforce_sorted=False)
    opt = IVON(layer, lr=0.1, num_data=10, loss_reduction="sum")  # the layer reorders its last states
    with opt.sampled_params():
        loss = layer(packed)[1].square().sum()
        expected = torch.autograd.grad(loss, layer.weight_ih_l0, retain_graph=True)[0] / len(LENGTHS)
        loss.backward()
    torch.testing.assert_close(layer.weight_ih_l0.grad, expected)


class OnPackedRows(nn.Module):
    """A layer on the rows of all time steps: of packed data, of a packed layer's output, or of a recurrent layer's."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = nn.LSTM(4, 4) if kind == "recurrent" else None
        self.first = None if kind == "data" else nn.Linear(4, 4)
        self.rows, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, lengths):
        x = x if self.first is None else self.first(x).tanh()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed = packed if self.rnn is None else self.rnn(packed)[0]
        rows = PackedSequence(self.rows(packed.data).tanh(), *packed[1:])
        return self.head(pad_packed_sequence(rows, batch_first=True)[0].sum(1))


@pytest.mark.filterwarnings("ignore:.*all examples share these:UserWarning")
@pytest.mark.parametrize("kind", ["data", "layer", "recurrent"])
def test_rows_of_packed_sequences_are_told_apart_in_every_batch(kind, generator):
    """Two sequences of two steps have a layout that a later batch, with as many rows, does not have."""
    model, y = OnPackedRows(kind).double(), torch.tensor([0, 1])
    engine = make_engine("fused", model)
    for lengths in ((2, 2), (1, 3)):
        x = torch.randn(2, max(lengths), 4, generator=generator, dtype=torch.float64)
        model.zero_grad()
        with engine.capture() as captured:
            loss = F.cross_entropy(model(x, torch.tensor(lengths)), y)
            captured.observe(loss)
            loss.backward()
        curvature = captured.mean_curvature()
        found = {name: curvature[p] for name, p in model.named_parameters()}

        def one(model, i, x=x, lengths=lengths):
            return F.cross_entropy(model(x[i : i + 1, : lengths[i]], torch.tensor(lengths[i : i + 1])), y[i : i + 1])

        assert relative_error(found, one_example_at_a_time(model, [0, 1], one)[1]) < 1e-10


def test_dropout_between_layers_of_packed_sequences_is_refused(generator):
    layer = nn.LSTM(4, 5, num_layers=2, dropout=0.3)
    packed = pack_sequence([torch.randn(length, 4, generator=generator) for length in (4, 3)])
    with pytest.raises(UnsupportedLayerError, match=r"LSTM draws dropout=0\.3 .*PackedSequence"):
        measure(layer, lambda: layer(packed)[1][0].sum())
    layer.eval()
    measure(layer, lambda: layer(packed)[1][0].sum())


FLAT, OFFSETS = torch.tensor([1, 2, 2, 5, 0, 6, 3, 3, 3, 4, 2, 0]), [0, 3, 3, 5, 9, 12]  # the second bag is empty


@pytest.mark.parametrize("engine", ["fused", "backpack"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("includes_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags_by_offsets_equal_the_loop(mode, includes_last, padding, engine, generator):
    options = {
        "mode": "sum" if mode == "weighted" else mode,
        "include_last_offset": includes_last,
        "padding_idx": padding,
    }
    bag, head = nn.EmbeddingBag(7, 4, **options).double(), nn.Linear(4, 3).double()
    model = nn.Sequential(bag, head)
    weight = torch.rand(len(FLAT), generator=generator, dtype=torch.float64) if mode == "weighted" else None
    y = torch.arange(5) % 3
    offsets = torch.tensor(OFFSETS if includes_last else OFFSETS[:-1])

    def one(model, i):
        part = slice(OFFSETS[i], OFFSETS[i + 1])
        ends = torch.tensor([0, OFFSETS[i + 1] - OFFSETS[i]] if includes_last else [0])
        some = None if weight is None else weight[part]
        return F.cross_entropy(model[1](model[0](FLAT[part], ends, some)), y[i : i + 1])

    measured = measure(model, lambda: F.cross_entropy(head(bag(FLAT, offsets, weight)), y), engine=engine)
    assert measured.num_examples == 5
    assert_measures(measured, model, list(range(5)), one, 1e-10)
