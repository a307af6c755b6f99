"""How losses reduce their examples: measured like a loop over single examples where it is recorded, else asked for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.loss import settled
from lightning_bayes.curvature.loss_reader import LossReader
from lightning_bayes.curvature.tape import Tape
from lightning_bayes.errors import BayesError, UnsupportedTrainingError

SIZES = [
    (4, 3),
    (6, 3),
    (3, 6),
    (5, 5),
    (2, 4),
]  # examples and outputs, whose numbers may coincide or divide each other
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


class Problem:
    """A network with its inputs and targets. A loss is a function of rows, and a row's own loss is its truth."""

    def __init__(self, sizes, generator):
        self.n, outputs = sizes
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
        self.x, self.t = draw(self.n, 4), draw(self.n, outputs)
        self.y = torch.randint(0, outputs, (self.n,), generator=generator)
        self.p = self.t.softmax(1)
        self.w = torch.rand(outputs, generator=generator, dtype=torch.float64) + 0.5

    def rows(self, i=None):
        """Outputs, values, labels and probabilities of all rows, or of row i."""
        own = slice(None) if i is None else slice(i, i + 1)
        return self.model(self.x[own]), self.t[own], self.y[own], self.p[own]

    def check(self, loss, reduction="auto"):
        """Compare with the loop; `loss` maps outputs, values, labels and probabilities to a scalar."""
        measured = measure(self.model, lambda: loss(*self.rows()), loss_reduction=reduction)
        assert measured.num_examples == self.n
        assert_measures(measured, self.model, list(range(self.n)), lambda m, i: loss(*self.rows(i)), 1e-9)


FUNCTIONS = {
    "cross entropy": lambda f, t, y, p, **o: F.cross_entropy(f, y, **o),
    "soft cross entropy": lambda f, t, y, p, **o: F.cross_entropy(f, p, label_smoothing=0.1, **o),
    "smoothed cross entropy": lambda f, t, y, p, **o: F.cross_entropy(f, y, label_smoothing=0.1, **o),
    "nll": lambda f, t, y, p, **o: F.nll_loss(f.log_softmax(1), y, **o),
    "bce with logits": lambda f, t, y, p, **o: F.binary_cross_entropy_with_logits(f, p, **o),
    "bce": lambda f, t, y, p, **o: F.binary_cross_entropy(f.sigmoid(), p, **o),
    "mse": lambda f, t, y, p, **o: F.mse_loss(f, t, **o),
    "mse, targets first": lambda f, t, y, p, **o: F.mse_loss(t, f, **o),
    "l1": lambda f, t, y, p, **o: F.l1_loss(f, t, **o),
    "smooth l1": lambda f, t, y, p, **o: F.smooth_l1_loss(f, t, **o),
    "huber": lambda f, t, y, p, **o: F.huber_loss(f, t, **o),
    "gaussian nll": lambda f, t, y, p, **o: F.gaussian_nll_loss(f, t, f.exp(), **o),
    "poisson nll": lambda f, t, y, p, **o: F.poisson_nll_loss(f, p, **o),
    "margin": lambda f, t, y, p, **o: F.multi_margin_loss(f, y, **o),
    "soft margin": lambda f, t, y, p, **o: F.soft_margin_loss(f, t.sign(), **o),
    "triplet": lambda f, t, y, p, **o: F.triplet_margin_loss(f, t, -t, **o),
}


@every_size
@pytest.mark.parametrize("reduction", ["mean", "sum", "none, then mean", "none, then sum"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loss_functions_equal_the_loop(name, reduction, sizes, generator):
    own, then = reduction.split(", then ") if "," in reduction else (reduction, "")

    def loss(*arguments):
        value = FUNCTIONS[name](*arguments, reduction=own)
        return {"mean": value.mean, "sum": value.sum}[then]() if then else value

    Problem(sizes, generator).check(loss)


class Same(torch.autograd.Function):
    """Returns its arguments, as DistributedDataParallel and backward hooks of modules do."""

    @staticmethod
    def forward(ctx, *values):
        return values

    @staticmethod
    def backward(ctx, *grads):
        return grads


RECORDED = {
    "by hand": lambda f, t, y, p: (f - t).square().mean(),
    "by hand, dimension by dimension": lambda f, t, y, p: (f - t).square().sum(1).mean(0),
    "by hand, examples first": lambda f, t, y, p: (f - t).square().mean(0).sum(),
    "by hand, a sum over the examples first": lambda f, t, y, p: (f - t).square().sum(0).mean(),
    "by hand, a sum of means": lambda f, t, y, p: (f - t).square().mean(1).sum(),
    "by hand, a sum": lambda f, t, y, p: 0.5 * (f - t).square().sum(),
    "divided by the number": lambda f, t, y, p: (f - t).square().sum() / len(f),
    "half a sum, divided": lambda f, t, y, p: 0.5 * (f - t).square().sum() / len(f),
    "divided by the number of values": lambda f, t, y, p: (f - t).square().sum() / f.numel(),
    "divided twice": lambda f, t, y, p: (f - t).square().sum() / f.shape[1] / len(f),
    "divided by a tensor": lambda f, t, y, p: (f - t).square().sum() / torch.tensor(f.numel()),
    "distances": lambda f, t, y, p: (f - t).square().sum(1).sqrt().mean(),
    "norms": lambda f, t, y, p: (f - t).norm(dim=1).mean(),
    "a factor": lambda f, t, y, p: 0.3 * F.mse_loss(f, t),
    "a difference": lambda f, t, y, p: 3 - F.mse_loss(f, t) - F.l1_loss(f, t),
    "two terms": lambda f, t, y, p: F.cross_entropy(f, y) + 0.1 * F.mse_loss(f, t),
    "two terms in place": lambda f, t, y, p: F.cross_entropy(f, y).add_(F.mse_loss(f, t)).div_(2),
    "stacked terms": lambda f, t, y, p: torch.stack([F.cross_entropy(f, y), F.mse_loss(f, t)]).mean(),
    "weighted terms": lambda f, t, y, p: (torch.stack([F.mse_loss(f, t), F.l1_loss(f, t)]) * torch.ones(2)).sum(),
    "a list of terms": lambda f, t, y, p: sum([F.cross_entropy(f, y), F.mse_loss(f, t)]) / 2,
    "values of two terms": lambda f, t, y, p: (F.l1_loss(f, t, reduction="none") + (f - t) ** 2).mean(),
    "focal": lambda f, t, y, p: ((1 - (-(c := F.cross_entropy(f, y, reduction="none"))).exp()) ** 2 * c).mean(),
    "cross entropy by hand": lambda f, t, y, p: -(p * f.log_softmax(1)).sum(1).mean(),
    "cross entropy by hand, a sum": lambda f, t, y, p: -(p * F.log_softmax(f, 1)).sum(),
    "gathered": lambda f, t, y, p: -f.log_softmax(1).gather(1, y[:, None]).mean(),
    "indexed": lambda f, t, y, p: -f.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "all rows in order": lambda f, t, y, p: F.mse_loss(f[torch.arange(len(f))], t[:]),
    "a distribution": lambda f, t, y, p: -torch.distributions.Normal(f, 1.0).log_prob(t).sum(1).mean(),
    "another precision": lambda f, t, y, p: F.mse_loss(f, t).double().clone().reshape(()),
    "permuted rows": lambda f, t, y, p: F.mse_loss(f[(i := torch.arange(len(f)).flip(0))], t[i]),
    "reordered rows": lambda f, t, y, p: F.l1_loss(f[(i := torch.arange(len(f)).roll(1))], t[i], reduction="sum"),
    "flipped rows": lambda f, t, y, p: F.mse_loss(f.flip(0, 1), t.flip(0, 1)),
    "flipped rows by name": lambda f, t, y, p: F.mse_loss(torch.flip(f, dims=(0,)), t.flip(0), reduction="sum"),
    "rolled rows": lambda f, t, y, p: F.l1_loss(f.roll(1, 0), torch.roll(t, 1, dims=0), reduction="sum"),
    "rolled rows and columns": lambda f, t, y, p: F.mse_loss(f.roll((1, 2), dims=(0, 1)), t.roll((1, 2), (0, 1))),
    "one column": lambda f, t, y, p: F.mse_loss(f[:, 0], t[:, 0]),
    "columns apart": lambda f, t, y, p: F.mse_loss(torch.cat([f[:, :1], f[:, 1:]], 1), t),
    "norms of a stated order": lambda f, t, y, p: torch.norm(f - t, 2, 1).mean(),
    "the larger of two": lambda f, t, y, p: torch.max((f - t).square(), (f - t).abs()).mean(),
    "arguments by name": lambda f, t, y, p: torch.mul(input=(f - t).masked_fill(mask=t > 0, value=0.0), other=f).mean(),
    "returned as it is": lambda f, t, y, p: Same.apply(t.sum(), Same.apply(t, F.mse_loss(f, t))[1])[1] / 2,
    "batchmean": lambda f, t, y, p: F.kl_div(f.log_softmax(1), p, reduction="batchmean"),
}


@every_size
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_losses_equal_the_loop(name, sizes, generator):
    Problem(sizes, generator).check(RECORDED[name])


UNKNOWN = {
    "a ratio": lambda f, t, y, p: (f - t).square().sum() / f.square().sum(),
    "a product": lambda f, t, y, p: F.mse_loss(f, t) * F.l1_loss(f, t),
    "a data-dependent factor": lambda f, t, y, p: f.logsumexp((0, 1)) * F.mse_loss(f, t),
    "mean and sum": lambda f, t, y, p: F.mse_loss(f, t) + F.l1_loss(f, t, reduction="sum"),
    "divided by another number": lambda f, t, y, p: (f - t).square().sum() / 37,
    "a mean times the number": lambda f, t, y, p: (f - t).square().mean() * (3 * len(f)) / 3 * f.shape[1],
    "values divided by the number": lambda f, t, y, p: ((f - t).square() / len(f)).sum(),
    "a root of a sum": lambda f, t, y, p: (f - t).square().sum().sqrt(),
    "a norm": lambda f, t, y, p: (f - t).norm(),
    "the largest row": lambda f, t, y, p: (f - t).square().mean(1).amax(0),
    "the largest": lambda f, t, y, p: (f - t).square().max(),
    "columns after their means": lambda f, t, y, p: (f - t).square().mean(0).sqrt().sum(),
    "a variance": lambda f, t, y, p: f.var(0).sum(),
    "centred": lambda f, t, y, p: (f - f.mean(0)).square().mean(),
    "chosen rows": lambda f, t, y, p: F.mse_loss(f[: len(f) // 2], t[: len(f) // 2]),
    "rows of a mask": lambda f, t, y, p: F.mse_loss(f[(m := torch.arange(len(f)) > 0)], t[m]),
    "the hardest": lambda f, t, y, p: (f - t).square().mean(1).topk(1)[0].mean(),
    "a masked mean": lambda f, t, y, p: ((m := torch.arange(len(f)) > 0) * (f - t).square().mean(1)).sum() / m.sum(),
    "normalised weights": lambda f, t, y, p: ((w := t[:, 0].abs()) / w.sum() * (f - t).square().mean(1)).sum(),
    "a loop over examples": lambda f, t, y, p: sum(F.mse_loss(f[i], t[i]) for i in range(len(f))) / len(f),
    "a loop over rows": lambda f, t, y, p: sum(F.mse_loss(a, b) for a, b in zip(f, t, strict=True)),
}


@every_size
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_losses_are_asked_for(name, sizes, generator):
    problem = Problem(sizes, generator)
    with pytest.raises(BayesError, match=r"loss_reduction|mixes|keep the examples apart"):
        measure(problem.model, lambda: UNKNOWN[name](*problem.rows()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_declared_reduction_is_taken(reduction, generator):
    loss = lambda f, t, y, p: (f - t).square().sum().exp().log()  # noqa: E731
    problem = Problem((4, 3), generator)
    measured = measure(problem.model, lambda: loss(*problem.rows()), loss_reduction=reduction)
    assert measured.num_examples == 4
    if reduction == "sum":
        problem.check(loss, "sum")


def test_an_unknown_reduction_may_count_as_a_mean_aloud(generator):
    problem = Problem((4, 3), generator)
    with Tape() as tape:
        loss = UNKNOWN["a ratio"](*problem.rows())
    record = LossReader(tape).read(loss, 4)
    assert record.reduction == "unknown"
    with pytest.warns(UserWarning, match="counts as a mean"):
        assert settled(record, "auto_or_mean", 4).reduction == "mean"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("penalty", ["squares", "distance", "norms"])
def test_penalties_depend_on_no_example(penalty, reduction, generator):
    problem = Problem((4, 3), generator)
    start = [p.detach().clone() + 1 for p in problem.model.parameters()]
    terms = {
        "squares": lambda: 0.1 * sum(p.pow(2).sum() for p in problem.model.parameters()),
        "distance": lambda: sum(F.mse_loss(p, q) for p, q in zip(problem.model.parameters(), start, strict=True)),
        "norms": lambda: torch.stack([p.norm() for p in problem.model.parameters()]).mean(),
    }
    plain = lambda: F.cross_entropy(problem.rows()[0], problem.y, reduction=reduction)  # noqa: E731
    got = measure(problem.model, lambda: plain() + terms[penalty]())
    assert relative_error(got.curvature, measure(problem.model, plain).curvature) < 1e-9


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("kind", ["number", "tensor", "divisor"])
def test_numbers_that_are_not_finite_raise_no_error(kind, factor, generator):
    problem = Problem((4, 3), generator)
    for reduction in ("mean", "sum"):
        with Tape() as tape:
            loss = F.cross_entropy(problem.rows()[0], problem.y, reduction=reduction)
            number = torch.tensor(factor) if kind == "tensor" else factor
            loss = loss / number if kind == "divisor" and factor else loss * number
        assert LossReader(tape).read(loss, 4).reduction == reduction


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("host", [1, 4, 3])
def test_a_division_by_the_training_loop_is_no_part_of_the_loss(host, reduction, generator):
    problem = Problem((4, 3), generator)
    with Tape() as tape:
        loss = F.cross_entropy(problem.rows()[0], problem.y, reduction=reduction)
        divided = loss / host
    assert LossReader(tape).read(divided, 4, divided_by_host=True).reduction == reduction
    assert LossReader(tape).read(divided, 4, divided_by_host=True).call is not None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_examples_of_ignored_targets_do_not_count(reduction, weighted, smoothing, generator):
    problem = Problem((6, 3), generator)
    problem.y[[1, 4]] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": problem.w if weighted else None}
    measured = measure(problem.model, lambda: F.cross_entropy(problem.rows()[0], problem.y, **options))
    kept = Problem((6, 3), generator)
    kept.model, kept.x, kept.y = problem.model, problem.x[problem.y >= 0], problem.y[problem.y >= 0]
    truth = measure(kept.model, lambda: F.cross_entropy(kept.model(kept.x), kept.y, **options))
    assert measured.num_examples == truth.num_examples == 4
    assert relative_error(measured.curvature, truth.curvature) < 1e-9


@pytest.mark.parametrize("layout", ["classes second", "flat", "positions first"])
def test_an_example_counts_if_one_of_its_tokens_does(layout, generator):
    model = nn.Linear(4, 3).double()
    x = torch.randn(5, 2, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (5, 2), generator=generator)
    y[1], y[2, 0] = -100, -100
    with Tape() as tape:
        out = model(x)
        loss = {
            "classes second": lambda: F.cross_entropy(out.transpose(1, 2), y),
            "flat": lambda: F.cross_entropy(out.flatten(0, 1), y.flatten()),
            "positions first": lambda: F.cross_entropy(out.transpose(0, 1).flatten(0, 1), y.T.flatten()),
        }[layout]()
    assert LossReader(tape).read(loss, 5, "strided" if layout == "positions first" else "rows").num_counted == 4


def test_chosen_rows_are_not_hidden_by_a_dimension_of_the_size_of_the_batch(generator):
    layer, x = nn.Linear(3, 5), torch.randn(10, 3, generator=generator)  # two rows for each of five examples
    with Tape() as tape:
        loss = layer(x)[:5].square().mean()
    assert LossReader(tape).read(loss, 5).reduction == "unknown"


@pytest.mark.parametrize("positions", [3, 4, 8])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_mean_of_the_losses_of_positions_equals_the_loop(batch_first, positions, generator):
    model = nn.ModuleDict({"rnn": nn.GRU(3, 5, batch_first=batch_first), "head": nn.Linear(5, 4)}).double()
    x = torch.randn(4, positions, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (4, positions), generator=generator)

    def loss(model, rows=slice(None)):
        out = model["head"](model["rnn"](x[rows] if batch_first else x[rows].transpose(0, 1))[0])
        columns = out.unbind(1) if batch_first else out.unbind(0)
        losses = [F.cross_entropy(column, y[rows][:, k]) for k, column in enumerate(columns)]
        return sum(losses) / len(losses)

    measured = measure(model, lambda: loss(model))
    _, square = one_example_at_a_time(model, list(range(4)), lambda m, i: loss(m, [i]))
    assert measured.num_examples == 4
    assert relative_error(measured.curvature, square) < 1e-9


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.log_variance = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def training_step(self, x, t, reduction):
        mean = self.body(x)
        return F.gaussian_nll_loss(mean, t, self.log_variance.exp().expand_as(mean), reduction=reduction)


@pytest.mark.filterwarnings("ignore:.*all examples share these:UserWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_learned_variance_is_part_of_every_loss(reduction, generator):
    model = Noise().double()
    x, t = (torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    measured = measure(model, lambda: model.training_step(x, t, reduction))
    one = lambda m, i: m.training_step(x[i : i + 1], t[i : i + 1], reduction)  # noqa: E731
    _, square = one_example_at_a_time(model, list(range(5)), one)
    assert relative_error(measured.curvature, square) < 1e-9


def test_a_loss_of_an_own_function_is_asked_for(generator):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            ctx.save_for_backward(values)
            return values.square().mean()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 * ctx.saved_tensors[0] / ctx.saved_tensors[0].numel()

    problem = Problem((4, 3), generator)
    with pytest.raises(UnsupportedTrainingError, match="not recorded"):
        measure(problem.model, lambda: Own.apply(problem.rows()[0]))
