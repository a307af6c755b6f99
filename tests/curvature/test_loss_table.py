"""Losses as people write them: measured right against one example at a time, or asked for, and never guessed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import BayesError, UnsupportedTrainingError

SIZES = [(4, 6, 3), (4, 4, 4), (6, 3, 2), (3, 6, 6)]  # examples, tokens, classes
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


class Problem:
    """A network of tokens, targets, and a mask that leaves one example out and parts of the others."""

    def __init__(self, sizes, generator):
        self.n, self.tokens, self.classes = sizes
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, self.classes)).double()
        self.x, self.values = draw(self.n, self.tokens, 4), draw(self.n, self.tokens, self.classes)
        self.y = torch.randint(0, self.classes, (self.n, self.tokens), generator=generator)
        self.mask = torch.rand(self.n, self.tokens, generator=generator) < 0.6
        self.mask[:, 0], self.mask[1] = True, False
        self.weight = torch.rand(self.n, self.tokens, generator=generator, dtype=torch.float64) + 0.1
        self.rows = torch.ones(self.n, dtype=torch.bool)
        self.rows[1] = False
        self.kept = self.weight * self.mask

    def out(self, rows=slice(None)):
        return self.model(self.x[rows])

    def ce(self, rows=slice(None)):
        """Cross-entropy by token, ``[n, tokens]``."""
        return F.cross_entropy(self.out(rows).transpose(1, 2), self.y[rows], reduction="none")


def row(j):
    return slice(j, j + 1)


# Losses with masks, and the sum of example j's terms in them, before the division by `total`.
MASKED = {
    "weighted sum": (lambda p: (p.ce() * p.mask).sum() / p.mask.sum(), "mask"),
    "clamped": (lambda p: (p.ce() * p.mask).sum() / p.mask.sum().clamp(min=1), "mask"),
    "with an epsilon": (lambda p: (p.ce() * p.mask.double()).sum() / (p.mask.double().sum() + 1e-9), "mask"),
    "flattened": (lambda p: (p.ce().flatten() * p.mask.flatten()).sum() / p.mask.sum(), "mask"),
    "by example first": (lambda p: (p.ce() * p.mask).sum(1).sum() / p.mask.sum(), "mask"),
    "negated": (lambda p: (-(-p.ce() * p.mask)).sum() / p.mask.sum(), "mask"),
    "positions first": (lambda p: (p.ce().t() * p.mask.t()).sum() / p.mask.sum(), "mask"),
    "times the inverse": (lambda p: (p.ce() * p.mask).sum() * (1 / p.mask.double().sum()), "mask"),
    "mean of masked by mean of mask": (lambda p: (p.ce() * p.mask).mean() / p.mask.double().mean(), "mask"),
    "filled": (lambda p: p.ce().masked_fill(~p.mask, 0).sum() / p.mask.sum(), "mask"),
    "where": (lambda p: torch.where(p.mask, p.ce(), 0.0).sum() / p.mask.sum(), "mask"),
    "where not": (lambda p: torch.where(~p.mask, torch.zeros(()).double(), p.ce()).sum() / p.mask.sum(), "mask"),
    "chosen values": (lambda p: p.ce()[p.mask].mean(), "mask"),
    "chosen sum by count": (lambda p: p.ce()[p.mask].sum() / p.mask.sum(), "mask"),
    "masked select": (lambda p: p.ce().masked_select(p.mask).mean(), "mask"),
    "chosen logits": (lambda p: F.cross_entropy(p.out()[p.mask], p.y[p.mask]), "mask"),
    "chosen logits, sum": (
        lambda p: F.cross_entropy(p.out()[p.mask], p.y[p.mask], reduction="sum") / int(p.mask.sum()),
        "mask",
    ),
    "chosen rows": (lambda p: F.cross_entropy(p.out()[p.rows].flatten(0, 1), p.y[p.rows].flatten()), "rows"),
    "rows by number": (lambda p: p.ce()[torch.arange(p.n)[p.rows]].mean(), "rows"),
    "index select": (lambda p: p.ce().index_select(0, p.rows.nonzero()[:, 0]).mean(), "rows"),
    "masked rows": (lambda p: (p.ce() * p.rows[:, None]).sum() / p.rows.sum() / p.tokens, "rows"),
    "ignored": (lambda p: F.cross_entropy(p.out().transpose(1, 2), p.y.masked_fill(~p.mask, -100)), "mask"),
    "weighted mean": (lambda p: (p.ce() * p.weight).sum() / p.weight.sum(), "weight"),
    "normalised mask": (lambda p: (p.ce() * (p.mask.double() / p.mask.sum())).sum(), "mask"),
    "normalised rows": (lambda p: (p.ce().mean(1) * (p.rows.double() / p.rows.sum())).sum(), "rows"),
    "normalised weight": (lambda p: (p.ce() * (p.weight / p.weight.sum())).sum(), "weight"),
    "divided weighted values": (lambda p: (p.ce() * p.weight / p.weight.sum()).sum(), "weight"),
    "normalised weight of the chosen": (lambda p: (p.ce() * p.kept / p.kept[p.mask].sum())[p.mask].sum(), "kept"),
    "weighted chosen by weight": (lambda p: (p.ce() * p.kept)[p.rows].sum() / p.kept[p.rows].sum(), "kept"),
    "weighted select by weight": (
        lambda p: (p.ce() * p.kept).masked_select(p.mask).sum() / p.kept[p.mask].sum(),
        "kept",
    ),
    "mean of sums by mean of mask": (
        lambda p: (p.ce() * p.rows[:, None]).sum(1).mean() / p.rows.double().mean() / p.tokens,
        "rows",
    ),
    "two terms, one mask": (
        lambda p: ((p.ce() * p.mask).sum() + (0.3 * p.ce() * p.mask).sum()) / p.mask.sum() / 1.3,
        "mask",
    ),
}


@every_size
@pytest.mark.parametrize("name", MASKED)
def test_masked_means_count_the_examples_that_the_mask_keeps(name, sizes, generator):
    p = Problem(sizes, generator)
    loss, of = MASKED[name]
    weights = {"mask": p.mask, "rows": p.rows[:, None].expand_as(p.mask), "weight": p.weight, "kept": p.kept}[
        of
    ].double()
    counted = [j for j in range(p.n) if weights[j].any()]
    share = lambda _, j: len(counted) * (p.ce(row(j)) * weights[row(j)]).sum() / weights.sum()  # noqa: E731
    measured = measure(p.model, lambda: loss(p))
    grad, square = one_example_at_a_time(p.model, counted, share)
    assert measured.num_examples == len(counted)
    assert relative_error(measured.grad, grad) < 1e-8
    assert relative_error(measured.curvature, square) < 1e-8


@every_size
@pytest.mark.parametrize("name", ["weighted sum", "chosen values", "chosen rows"])
def test_a_mask_that_keeps_everything_or_nothing_is_no_special_case(name, sizes, generator):
    p = Problem(sizes, generator)
    p.mask[:], p.rows[:] = True, True
    measured = measure(p.model, lambda: MASKED[name][0](p))
    _, square = one_example_at_a_time(p.model, list(range(p.n)), lambda _, j: p.ce(row(j)).mean())
    assert measured.num_examples == p.n
    assert relative_error(measured.curvature, square) < 1e-8
    p.mask[:] = False
    assert measure(p.model, lambda: MASKED["clamped"][0](p)).num_examples == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_means_are_read_in_half_precision(dtype, generator):
    model, x = nn.Linear(4, 3).to(dtype), torch.randn(5, 4, generator=generator).to(dtype)
    mask = torch.tensor([True, True, False, True, True])

    def loss():
        return model(x).square().masked_fill(~mask[:, None], 0).mean(1).float().sum() / mask.sum()

    assert measure(model, loss).num_examples == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chosen", [lambda v, rows: v[rows], lambda v, rows: v.masked_select(rows[:, None])])
def test_chosen_weighted_values_are_read_in_any_precision(chosen, dtype, generator):
    model, x = nn.Linear(4, 3).to(dtype), torch.randn(5, 4, generator=generator).to(dtype)
    rows, weight = torch.tensor([True, True, False, True, True]), torch.rand(5, 1, generator=generator).to(dtype)
    assert measure(model, lambda: chosen(model(x).square() * weight, rows).mean()).num_examples == 4


def focal(out, y):
    own = F.cross_entropy(out, y, reduction="none")
    return ((1 - (-own).exp()) ** 2 * own).mean()


def dice(out, y):
    """Of each example."""
    share = out.softmax(2).flatten(1)
    truth = F.one_hot(y, out.shape[2]).flatten(1)
    return 1 - (2 * (share * truth).sum(1) + 1) / (share.sum(1) + truth.sum(1) + 1)


def ctc(p, rows, reduction="mean", **options):
    labels = torch.ones(p.n, 2, dtype=torch.long)[rows]
    labels[:, 0] = p.classes - 1 if p.classes > 2 else 1
    lengths = torch.full((p.n,), p.tokens)[rows], torch.arange(1, p.n + 1)[rows].clamp(max=1 + (p.tokens > 4))
    return F.ctc_loss(p.out(rows).log_softmax(2).transpose(0, 1), labels, *lengths, reduction=reduction, **options)


def by_number(out, loss):
    return torch.stack([loss(out, j) for j in range(len(out))])


def listed(p, r):
    return zip(p.out(r), p.y[r], strict=True)


# Losses that an example has alone: p and rows to a scalar.
OWN = {
    "label smoothing": lambda p, r: F.cross_entropy(p.out(r).transpose(1, 2), p.y[r], label_smoothing=0.2),
    "label smoothing, sum": lambda p, r: F.cross_entropy(
        p.out(r).flatten(0, 1), p.y[r].flatten(), label_smoothing=0.2, reduction="sum"
    ),
    "focal": lambda p, r: focal(p.out(r).flatten(0, 1), p.y[r].flatten()),
    "Dice of each example": lambda p, r: dice(p.out(r), p.y[r]).mean(),
    "CTC": lambda p, r: ctc(p, r),
    "CTC, sum": lambda p, r: ctc(p, r, "sum"),
    "CTC without infinities": lambda p, r: ctc(p, r, zero_infinity=True),
    "masked mean of each example": lambda p, r: ((p.ce(r) * p.weight[r]).sum(1) / p.weight[r].sum(1)).mean(),
    "mask times mean": lambda p, r: (p.ce(r) * p.mask[r]).mean(),
    "masked sum": lambda p, r: (p.ce(r) * p.mask[r]).sum(),
    "masked sum by examples": lambda p, r: (p.ce(r) * p.weight[r]).sum() / len(p.y[r]),
    "stacked list": lambda p, r: torch.stack([F.cross_entropy(o, t) for o, t in listed(p, r)]).mean(),
    "stacked list by number": lambda p, r: by_number(p.out(r), lambda o, j: F.cross_entropy(o[j], p.y[r][j])).mean(),
    "stacked slices": lambda p, r: by_number(p.out(r), lambda o, j: F.mse_loss(o[row(j)], p.values[r][row(j)])).sum(),
    "sum of a list": lambda p, r: sum(F.cross_entropy(o, t) for o, t in listed(p, r)),
    "mean of a list": lambda p, r: (
        sum(F.cross_entropy(o, t) + 0.1 * o.square().mean() for o, t in listed(p, r)) / len(p.y[r])
    ),
    "list of means": lambda p, r: sum(F.cross_entropy(o, t) / len(p.y[r]) for o, t in listed(p, r)),
    "softened list": lambda p, r: sum(F.cross_entropy(o / 4, t) for o, t in listed(p, r)),
    "list of softened outputs": lambda p, r: sum(
        F.cross_entropy(o, t) for o, t in zip(p.out(r) / 4, p.y[r], strict=True)
    ),
    "list of vectors": lambda p, r: torch.cat([F.cross_entropy(o, t).reshape(1) for o, t in listed(p, r)]).mean(),
    "dot products of a list": lambda p, r: sum(o.flatten() @ o.flatten() for o in p.out(r)),
    "sum of listed vectors": lambda p, r: sum(o.square() for o in p.out(r)).sum(),
    "losses in a list": lambda p, r: sum(p.ce(r).mean(1)),
    "Gaussian": lambda p, r: F.gaussian_nll_loss(p.out(r), p.values[r], torch.ones_like(p.values[r])),
    "weighted Huber": lambda p, r: (
        F.huber_loss(p.out(r), p.values[r], reduction="none") * p.weight[r][..., None]
    ).mean(),
}


@every_size
@pytest.mark.parametrize("name", OWN)
def test_losses_of_examples_equal_the_loop(name, sizes, generator):
    p = Problem(sizes, generator)
    measured = measure(p.model, lambda: OWN[name](p, slice(None)))
    grad, square = one_example_at_a_time(p.model, list(range(p.n)), lambda _, j: OWN[name](p, row(j)))
    assert measured.num_examples == p.n
    assert relative_error(measured.grad, grad) < 1e-8
    assert relative_error(measured.curvature, square) < 1e-8


ASKED = {
    "Dice of the batch": lambda p: 1 - (2 * p.out().sigmoid().sum() + 1) / (p.out().sigmoid().sum() + p.n + 1),
    "by the number of positives": lambda p: p.ce().sum() / 7.0,
    "times an eighth": lambda p: p.ce().sum() * (1 / p.n / p.tokens),
    "mask without its count": lambda p: (p.ce() * p.mask).sum() / 7.5,
    "masked sum, rescaled": lambda p: (p.ce() * p.mask).sum() * (1 / (int(p.mask.sum()) + 1)),
    "hardest": lambda p: p.ce().mean(1).topk(2).values.mean(),
    "times the sorted": lambda p: (p.ce().mean(1) * p.ce().mean(1).topk(p.n).values).mean(),
    "first examples": lambda p: p.ce()[:2].mean(),
    "some of a list": lambda p: sum(F.cross_entropy(o, t) for o, t in list(listed(p, slice(None)))[:2]),
    "an example twice": lambda p: sum(F.cross_entropy(p.out()[j], p.y[j]) for j in [0, *range(p.n - 1)]),
    "a list out of order": lambda p: torch.stack(
        [F.cross_entropy(p.out()[j], p.y[j]) for j in range(p.n)][::-1]
    ).mean(),
    "list of shares": lambda p: sum(p.ce().mean(1) / p.n),
    "list of rows of shares": lambda p: sum(row.sum() for row in p.ce() / p.n),
    "shares by number": lambda p: sum((p.ce().mean(1) / p.n)[j] for j in range(p.n)),
    "stacked shares": lambda p: torch.stack([*(p.ce().mean(1) / p.n)]).sum(),
    "a mean of halves of shares": lambda p: sum(0.5 * share for share in 2 * p.ce().mean(1) / p.n),
    "chosen shares": lambda p: (p.ce().mean(1) / p.n)[p.rows].sum(),
    "chosen sum times the inverse": lambda p: p.ce().mean(1)[p.rows].sum() * (1 / p.n),
    "means of different rows": lambda p: p.ce()[p.rows].mean() + p.ce()[~p.rows].mean(),
    "a list and a mean": lambda p: sum(F.cross_entropy(o, t) for o, t in listed(p, slice(None))) + p.ce().mean(),
    "the softest maximum": lambda p: p.ce().mean(1).logsumexp(0),
    "root of a part": lambda p: (F.cross_entropy(p.out()[0], p.y[0]) + F.cross_entropy(p.out()[1], p.y[1])).sqrt(),
    "squared weights": lambda p: (p.ce() * p.weight).square().sum() / p.weight.sum(),
}


@every_size
@pytest.mark.parametrize("name", ASKED)
def test_what_cannot_be_read_is_asked_for(name, sizes, generator):
    p = Problem(sizes, generator)
    with pytest.raises(UnsupportedTrainingError, match=r"per_example_loss|loss_reduction") as caught:
        measure(p.model, lambda: ASKED[name](p))
    assert len(str(caught.value)) <= 600


def test_examples_that_are_compared_are_refused(generator):
    p = Problem(SIZES[0], generator)
    with pytest.raises(BayesError, match=r"mixes (its|the) examples"):
        measure(p.model, lambda: F.cross_entropy(p.out().mean(1) @ p.values.mean(1).t() @ p.out().mean(1), p.y[:, 0]))
