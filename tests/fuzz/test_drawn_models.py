"""Networks drawn at random, with layers in any layout, shared, in place or masked: equal to the loop, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from fuzz_settings import fuzz
from hypothesis import strategies as st
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import BayesError

FEATURES, CLASSES, LONGEST = 4, 3, 6


class Positions(nn.Module):
    """One table for all examples."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(LONGEST, FEATURES)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


class Around(nn.Module):
    """A layer between two rearrangements."""

    def __init__(self, layer, before, after):
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, x):
        hidden = self.layer(self.before(x))
        return self.after(hidden[0] if isinstance(hidden, tuple) else hidden, x)


class Tied(nn.Module):
    """A weight that is used once more, by hand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return F.linear(self.layer(x).tanh(), self.layer.weight)


class Scaled(nn.Module):
    """Parameters of its own, and an attention over the positions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((FEATURES,), 0.7))

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ (x * self.scale)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        out = self.layer(x)
        out += x
        return F.relu_(out)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return self.layer(x).masked_fill(torch.arange(x.shape[1])[:, None] % 3 == 1, 0.0) + x


class Experts(nn.Module):
    """Rows go to the expert that a gate chooses."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, 2), nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x):
        rows = x.flatten(0, 1)
        share, out = self.gate(rows).softmax(1), torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            chosen = (share.argmax(1) == k).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(rows[chosen]) * share[chosen, k, None])
        return out.view_as(x) + x


class Packed(nn.Module):
    """A recurrent layer on sequences whose lengths follow from their numbers."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(FEATURES, FEATURES, batch_first=True)

    def forward(self, x):
        lengths = 1 + (x[:, 0, 0].detach() > 0).long() * (x.shape[1] - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return out + x


class Bags(nn.Module):
    """Bags of indices by offsets, one for each example, added to all positions."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, FEATURES, mode="sum")

    def forward(self, x):
        keys = (x.detach()[..., 0] > 0).long() + (x.detach()[..., 1] > 0.3)
        return x + self.bag(keys.flatten(), torch.arange(0, keys.numel(), x.shape[1]))[:, None]


def transposed(layer):
    return Around(layer, lambda x: x.transpose(0, 1), lambda h, x: h.transpose(0, 1))


def as_rows(layer):
    return Around(layer, lambda x: x.flatten(0, 1), lambda h, x: h.view_as(x))


def summary(layer):
    """A layer on one row for each example, added to all positions."""
    return Around(layer, lambda x: x.mean(1), lambda h, x: x + h[:, None])


PARTS = {
    "linear": lambda: nn.Linear(FEATURES, FEATURES),
    "norm": lambda: nn.LayerNorm(FEATURES),
    "tanh": nn.Tanh,
    "positions": Positions,
    "transposed linear": lambda: transposed(nn.Linear(FEATURES, FEATURES)),
    "transposed norm": lambda: transposed(nn.LayerNorm(FEATURES)),
    "sequence-first RNN": lambda: transposed(nn.RNN(FEATURES, FEATURES)),
    "attention": lambda: nn.TransformerEncoderLayer(FEATURES, 2, 5, dropout=0, batch_first=True),
    "sequence-first attention": lambda: transposed(nn.TransformerEncoderLayer(FEATURES, 2, 5, dropout=0)),
    "rows": lambda: as_rows(nn.Linear(FEATURES, FEATURES)),
    "rows, normed": lambda: as_rows(nn.GroupNorm(2, FEATURES)),
    "summary": lambda: summary(nn.Linear(FEATURES, FEATURES)),
    "convolution": lambda: Around(nn.Conv1d(FEATURES, FEATURES, 3, padding=1), lambda x: x.mT, lambda h, x: h.mT),
    "tied": Tied,
    "own parameters": Scaled,
    "in place": InPlace,
    "masked": Masked,
    "experts": Experts,
    "packed LSTM": lambda: Packed(nn.LSTM),
    "packed GRU": lambda: Packed(nn.GRU),
    "bags": Bags,
}


def weights(example):
    return 1.0 + example[1]


LOSSES = {
    "every position": lambda m, e: F.cross_entropy(m(e[0]).flatten(0, 1), e[1].flatten()),
    "last position": lambda m, e: F.cross_entropy(m(e[0])[:, -1], e[1][:, -1]),
    "first position": lambda m, e: F.cross_entropy(m(e[0])[:, 0], e[1][:, 0]),
    "mean of positions": lambda m, e: F.cross_entropy(m(e[0]).mean(1), e[1][:, 0]),
    "squares": lambda m, e: (m(e[0]) - 1).square().mean(),
    "weighted": lambda m, e: (weights(e) * (m(e[0]) - 1).square().sum(2)).mean(),
    "masked sum": lambda m, e: (m(e[0]) - 1).square().sum(2)[e[1] > 0].sum(),
    "a list": lambda m, e: torch.stack([F.cross_entropy(o, y) for o, y in zip(m(e[0]), e[1], strict=True)]).mean(),
    "the sum of a list": lambda m, e: sum(F.cross_entropy(o, y) for o, y in zip(m(e[0]), e[1], strict=True)),
}


def judge(parts, sharing, loss, examples, positions, seed):
    """Whether a model is measured right; False if it is refused."""
    torch.manual_seed(seed)
    made = [PARTS[name]() for name in parts]
    if sharing:
        made.append(made[0])  # once more, at the end
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), *made, nn.Linear(FEATURES, CLASSES)).double()
    x = torch.randn(examples, positions, FEATURES, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (examples, positions))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*all examples share these")
            warnings.filterwarnings("ignore", "There is a performance drop")
            measured = measure(model, lambda: LOSSES[loss](model, [x, y]))
    except BayesError:
        return False
    _, square = one_example_at_a_time(model, list(zip(x.split(1), y.split(1), strict=True)), LOSSES[loss])
    kept = {name: value for name, value in square.items() if value.norm() > 1e-20}  # a key's bias has no gradient
    assert measured.num_examples == examples
    assert relative_error({name: measured.curvature[name] for name in kept}, kept) < 1e-6
    return True


@fuzz(
    5,
    2000,
    parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4),
    sharing=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    examples=st.integers(2, 5),
    positions=st.integers(2, LONGEST),
    seed=st.integers(0, 2**16),
)
def test_drawn_models_are_right_or_refused(parts, sharing, loss, examples, positions, seed):
    judge(parts, sharing, loss, examples, positions, seed)


def test_rows_that_fit_a_layout_by_chance_are_followed():
    """An expert that sees twice as many rows as there are examples, two of the last one and one of the one before."""
    assert judge(["experts", "attention"], False, "every position", 3, 4, 1)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_alone_is_right(part):
    assert judge([part], False, "every position", 3, 5, 0)
