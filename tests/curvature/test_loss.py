"""How losses reduce their examples: right against one example at a time, whatever divides the batch, or refused."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from torch import nn
from torch.nn.parallel.distributed import _DDPSink

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.loss_graph import mark_division
from lightning_bayes.curvature.loss_scale import loss_functions, read_loss_scale
from lightning_bayes.errors import BayesError, ExampleDimensionError, UnsupportedTrainingError
from lightning_bayes.optim.diagonal.vogn import VOGN

# The number of outputs or classes is a multiple of the number of examples, a divisor, the same, or neither.
SIZES = [(4, 8), (2, 6), (6, 3), (5, 5), (6, 4)]
every_size = pytest.mark.parametrize(("batch", "outputs"), SIZES)


def problem(batch, outputs, generator):
    model = nn.Linear(4, outputs).double()
    x = torch.randn(batch, 4, generator=generator, dtype=torch.float64)
    return model, x, torch.randn(batch, outputs, generator=generator, dtype=torch.float64)


def assert_right(measured, model, examples, one):
    grad, square = one_example_at_a_time(model, examples, one)
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


REDUCED = {  # all are right for a batch of one, too
    "mean": lambda v: v.mean(),
    "sum": lambda v: v.sum(),
    "mean, then sum": lambda v: v.mean(0).sum(),
    "sum, then mean": lambda v: v.sum(0).mean(),
    "mean of sums": lambda v: v.sum(1).mean(),
    "sum of means": lambda v: v.mean(1).sum(),
    "sum over examples and outputs": lambda v: v.sum() / v.numel(),
    "sum over examples": lambda v: v.sum() / len(v),
    "half the sum": lambda v: 0.5 * v.sum(),
    "sum of what is no NaN": lambda v: torch.nansum(v),
    "mean of what is no NaN": lambda v: torch.nanmean(v),
    "stacked terms": lambda v: torch.stack([v.mean(), v.square().mean()]) @ torch.tensor([1.0, 0.5]).double(),
    "one of stacked terms": lambda v: torch.stack([v.sum(), v.square().sum()])[1],
    "two stacked vectors": lambda v: torch.stack([v.mean(1), v.square().mean(1)]).mean(),
}


@every_size
@pytest.mark.parametrize("name", REDUCED)
def test_reduction_is_found_for_any_number_of_outputs(name, batch, outputs, generator):
    (model, x, y), reduced = problem(batch, outputs, generator), REDUCED[name]
    measured = measure(model, lambda: reduced((model(x) - y).square()))
    one = lambda m, e: reduced((m(e[0][None]) - e[1][None]).square())  # noqa: E731
    assert_right(measured, model, list(zip(x, y, strict=True)), one)


UNCLEAR = {
    "times one over the number of values": (lambda v: v.sum() * (1 / v.numel()), "sum rescaled by"),
    "times minus one over the number of examples": (lambda v: v.mean(1).sum() * (-1.0 / len(v)), "sum rescaled by -"),
    "a tensor's factor": (lambda v: torch.tensor(1 / len(v)).double() * v.mean(1).sum(), "sum rescaled by"),
    "a factor inside the sum": (lambda v: (v.mean(1) / len(v)).sum(), "sum rescaled by"),
    "a factor inside summands": (lambda v: (0.3 * v / len(v) + v.sqrt() / len(v)).sum(1).sum(), "sum rescaled by"),
    "a factor of listed rows": (lambda v: sum((row / len(v)).sum() for row in v), "a rescaled sum"),
    "a factor of stacked rows": (lambda v: (torch.stack([row.sum() for row in v]) / len(v)).sum(), "sum rescaled by"),
    "a factor inside the mean": (lambda v: (v * len(v)).mean(), "mean rescaled by"),
    "a mean for every example": (lambda v: v.mean().expand(len(v)).sum(), "repeats a mean by Expand"),
    "a mean added to every example": (lambda v: (v.mean() + torch.ones(len(v))).sum(), "repeats a mean by Add"),
    "mean times the number": (lambda v: v.mean() * len(v), "mean rescaled by"),
    "mean over the values times their number": (lambda v: v.mean() * v.numel(), "mean rescaled by"),
    "product": (lambda v: torch.einsum("bo,bo->", v, v), "by Bmm"),
    "product divided by the number": (lambda v: torch.einsum("bo,bo->", v, v) / len(v), "by Bmm"),
    "product of sums divided by the number": (lambda v: torch.einsum("bo,bp->", v, v) / len(v), "by"),
    "trace": (lambda v: torch.trace(v @ v.T), "mixes its examples by Mm"),
    "divided by a tensor": (lambda v: v.sum() / torch.tensor(float(len(v))), "sum rescaled by 1/"),
    "tanh of a sum": (lambda v: v.sum().tanh(), "is the Tanh of a sum"),
    "Dice": (lambda v: 1 - (2 * v.sum() + 1) / (v.sigmoid().sum() + len(v) + 1), "is a ratio of its terms"),
    "mean Dice of outputs": (lambda v: (1 - (2 * v.sum(0) + 1) / (v.sigmoid().sum(0) + 3)).mean(), "is a ratio"),
    "product of means": (lambda v: v.mean() * v.square().mean(), "combines its terms by Mul"),
    "variance over the examples": (lambda v: v.var(0).mean(), "by Var"),
    "centred by the batch": (lambda v: (v - v.mean(0)).square().mean(), "mixes its examples by Sub"),
    "unclear beside a mean": (lambda v: v.mean() + v.norm(), "by .*Norm"),
    "largest": (lambda v: v.max(), "by Max"),
    "norm": (lambda v: v.norm(), "by .*Norm"),
    "root of a sum": (lambda v: v.sum().sqrt(), "is the Sqrt of a sum"),
}


@every_size
@pytest.mark.parametrize("name", UNCLEAR)
def test_loss_that_may_be_a_mean_or_a_sum_is_refused_until_declared(name, batch, outputs, generator):
    (model, x, y), (reduced, words) = problem(batch, outputs, generator), UNCLEAR[name]
    if batch == 2 and ("times" in name or "factor" in name) and "values" not in name:
        pytest.skip("half a sum and twice a mean are factors of their own")

    def loss():
        return reduced((model(x) - y).square())

    with pytest.raises(
        UnsupportedTrainingError,
        match=f"The loss .*{words}.*batch of {batch} examples.*Pass loss_reduction='mean' or 'sum'",
    ):
        measure(model, loss)
    if "mixes" in words:
        with pytest.raises(ExampleDimensionError, match=r"^The loss mixes the examples of the batch by"):
            measure(model, loss, loss_reduction="mean")
        return
    grad = torch.autograd.grad(loss(), model.weight)[0]
    assert relative_error({"": measure(model, loss, loss_reduction="mean").grad["weight"]}, {"": grad}) < 1e-10
    assert relative_error({"": measure(model, loss, loss_reduction="sum").grad["weight"]}, {"": grad / batch}) < 1e-10


def test_factor_that_is_no_count_is_part_of_the_loss(generator):
    """A weight of a term, or the scale of half precision."""
    model, x, y = problem(4, 3, generator)
    for factor in (0.1, 0.5, 10, 4.0, torch.tensor(4.0).double(), 2.0**16):
        reduction = "sum" if factor in (0.1, 0.5) else "mean"
        measured = measure(model, lambda: factor * F.mse_loss(model(x), y, reduction=reduction))  # noqa: B023
        one = lambda m, e: factor * F.mse_loss(m(e[0]), e[1], reduction=reduction)  # noqa: E731, B023
        assert_right(measured, model, list(zip(x, y, strict=True)), one)


def test_function_of_a_mean_has_each_examples_share(generator):
    model, x, y = problem(4, 8, generator)
    measured = measure(model, lambda: F.mse_loss(model(x), y).sqrt())
    root = F.mse_loss(model(x), y).sqrt().detach()
    share = lambda m, e: F.mse_loss(m(e[0]), e[1]) / (2 * root)  # noqa: E731
    assert_right(measured, model, list(zip(x, y, strict=True)), share)


@pytest.mark.parametrize(("classes", "batch"), [(10, 5), (5, 5), (3, 5), (100, 50)])
@pytest.mark.parametrize("taken", [1, 4])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda out, y: F.mse_loss(out, F.one_hot(y, out.shape[1]).double())])
def test_loss_of_some_of_the_examples_is_refused_for_any_number_of_classes(loss, taken, classes, batch, generator):
    model, x, _ = problem(batch, classes, generator)
    y = torch.randint(0, classes, (batch,), generator=generator)
    words = "only some examples" if taken == 1 else rf"shape \[{taken}.*, but the layers saw {batch} examples"
    with pytest.raises(UnsupportedTrainingError, match=words):
        measure(model, lambda: loss(model(x)[:taken], y[:taken]))


@pytest.mark.parametrize("of", [lambda values, j: values[j], lambda values, j: values[j : j + 1]], ids=["row", "slice"])
def test_the_sum_of_the_losses_of_single_examples_is_a_sum(of, generator):
    model, x, _ = problem(5, 10, generator)
    y = torch.randint(0, 10, (5,), generator=generator)
    measured = measure(model, lambda: sum(F.cross_entropy(of(model(x), j), of(y, j)) for j in range(5)))
    assert_right(measured, model, list(range(5)), lambda m, j: F.cross_entropy(m(x[j]), y[j]))


def half_ignored(generator, batch=6, classes=3):
    y = torch.randint(0, classes, (batch,), generator=generator)
    y[[1, 4]] = -100
    return y


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_term_without_ignored_targets_has_all_examples(reduction, generator):
    model, x, values = problem(6, 3, generator)
    y = half_ignored(generator)

    def loss(out, rows=slice(None)):
        return F.cross_entropy(out, y[rows], reduction=reduction) + F.mse_loss(out, values[rows], reduction=reduction)

    measured = measure(model, lambda: loss(model(x)))
    assert measured.num_examples == 6

    def one(m, i):  # of a mean over four and one over six
        out, rows = m(x[i : i + 1]), slice(i, i + 1)
        label = F.cross_entropy(out, y[rows], reduction="sum") * (6 / 4 if reduction == "mean" else 1)
        return label + F.mse_loss(out, values[rows], reduction=reduction)

    assert_right(measured, model, list(range(6)), one)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_label_smoothing_and_penalties_do_not_count_ignored_examples(penalty, weighted, reduction, generator):
    model, x, _ = problem(6, 3, generator)
    y, weight = half_ignored(generator), torch.tensor([0.5, 2.0, 1.3]).double() if weighted else None
    options = {"weight": weight, "label_smoothing": 0.1}
    measured = measure(
        model,
        lambda: F.cross_entropy(model(x), y, reduction=reduction, **options) + penalty * model.weight.square().sum(),
    )
    counted = [i for i in range(6) if y[i] >= 0]
    total = 4 if weight is None else float(weight[y[counted]].sum())
    scale = 4 / total if reduction == "mean" else 1
    one = lambda m, i: scale * F.cross_entropy(m(x[i : i + 1]), y[i : i + 1], reduction="sum", **options)  # noqa: E731
    _, square = one_example_at_a_time(model, counted, one)
    assert measured.num_examples == 4
    assert relative_error(measured.curvature, square) < 1e-10


FLATTENED = {
    "batch first": (lambda out: out.flatten(0, 1), lambda y: y.flatten()),
    "positions first": (lambda out: out.transpose(0, 1).flatten(0, 1), lambda y: y.T.flatten()),
    "positions first by negative dimensions": (
        lambda out: out.transpose(-3, -2).reshape(-1, 3),
        lambda y: y.T.flatten(),
    ),
    "positions first by permuting": (lambda out: out.permute(1, 0, 2).reshape(-1, 3), lambda y: y.T.flatten()),
    "there and back": (lambda out: out.transpose(0, 1).transpose(1, 0).flatten(0, 1), lambda y: y.flatten()),
    "without the first position": (lambda out: out.transpose(0, 1)[1:].flatten(0, 1), lambda y: y.T[1:].flatten()),
}


@pytest.mark.parametrize("positions", [3, 5])
@pytest.mark.parametrize("name", FLATTENED)
def test_ignored_tokens_belong_to_their_example_in_either_order(name, positions, generator):
    """With as many positions as examples, too."""
    model, (flat_output, flat_target) = nn.Linear(4, 3).double(), FLATTENED[name]
    x = torch.randn(5, positions, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (5, positions), generator=generator)
    y[0], y[1, 2:] = -100, -100  # example 0 does not count at all
    if "without" in name:
        y[:, 0] = -100
    total = int((y >= 0).sum())
    measured = measure(model, lambda: F.cross_entropy(flat_output(model(x)), flat_target(y)))
    share = lambda m, i: 4 * F.cross_entropy(m(x[i]), y[i], reduction="sum") / total  # noqa: E731
    assert measured.num_examples == 4
    assert_right(measured, model, [1, 2, 3, 4], share)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks
def test_compiled_loss_is_measured(generator):
    model, x, y = problem(6, 3, generator)
    torch.compiler.reset()
    compiled = torch.compile(lambda out, target: F.mse_loss(out, target), backend="aot_eager")  # torch 2.5 wants Python
    measured = measure(model, lambda: compiled(model(x), y), loss_reduction="mean")
    assert_right(measured, model, list(zip(x, y, strict=True)), lambda m, e: F.mse_loss(m(e[0]), e[1]))


def test_loss_is_read_through_what_ddp_returns(generator):
    """It passes all outputs of the step through one node, the logits too."""
    model, x, y = problem(6, 3, generator)
    out, ddp = model(x), SimpleNamespace(_ddp_sink_clone=True)
    for reduction in ("mean", "sum"):
        loss, _ = _DDPSink.apply(lambda: ddp, F.mse_loss(out, y, reduction=reduction), out)
        assert read_loss_scale(loss, batch_size=6).reduction == reduction
        mark_division(divided := loss / 4)
        assert read_loss_scale(divided, batch_size=6).reduction == reduction


class OwnLoss(torch.autograd.Function):
    """A sum of squares that torch knows nothing of."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.square().sum()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_loss_of_an_own_function_is_refused_until_declared(generator):
    model, x, y = problem(4, 8, generator)
    with pytest.raises(UnsupportedTrainingError, match=r"reduces its values by OwnLoss .*Pass loss_reduction"):
        measure(model, lambda: OwnLoss.apply(model(x) - y))
    measured = measure(model, lambda: OwnLoss.apply(model(x) - y), loss_reduction="sum")
    assert_right(measured, model, list(zip(x, y, strict=True)), lambda m, e: (m(e[0]) - e[1]).square().sum())


MASKED = {  # of examples and outputs, both with a last example that is left out
    "mean of chosen rows": lambda v, mask: v[mask].mean(),
    "mean of chosen values": lambda v, mask: v[mask[:, None].expand_as(v)].mean(),
    "masked select": lambda v, mask: v.masked_select(mask[:, None]).mean(),
    "masked mean": lambda v, mask: (v.sum(1) * mask).sum() / mask.sum(),
    "masked mean of values": lambda v, mask: (v * mask[:, None]).sum() / mask[:, None].expand_as(v).sum(),
    "filled mean": lambda v, mask: v.masked_fill(~mask[:, None], 0).sum() / mask.sum(),
    "mean of where": lambda v, mask: torch.where(mask[:, None], v, 0).sum() / mask.sum(),
    "weighted mean": lambda v, mask: (v.sum(1) * mask.double()).sum() / mask.double().sum(),
    "rows by number": lambda v, mask: v[torch.arange(len(v))[mask]].mean(),
}


@pytest.mark.parametrize(("batch", "outputs"), [*SIZES, (4, 4), (2, 3), (3, 2)])
@pytest.mark.parametrize("name", MASKED)
def test_masked_means_are_means_over_the_examples_that_count(name, batch, outputs, generator):
    """With tokens, so that the number of chosen values may be a multiple of the batch."""
    for tokens in (1, 2, batch):
        (model, x, _), reduced = problem(batch, outputs, generator), MASKED[name]
        x = x.repeat_interleave(tokens, 0).unflatten(0, (batch, tokens))
        mask = torch.ones(batch, tokens, dtype=torch.bool)
        mask[-1] = False
        measured = measure(model, lambda: reduced(model(x).square().flatten(0, 1), mask.flatten()))  # noqa: B023
        assert measured.num_examples == batch - 1
        is_sum = "values" not in name and not name.startswith(("mean of chosen", "masked select", "rows"))
        values = tokens * (1 if is_sum else outputs)
        one = partial(lambda m, i, x, values: m(x[i]).square().sum() / values, x=x, values=values)
        assert_right(measured, model, list(range(batch - 1)), one)


@every_size
def test_the_hardest_examples_are_asked_for(batch, outputs, generator):
    model, x, _ = problem(batch, outputs, generator)
    with pytest.raises(UnsupportedTrainingError, match=r"may not hold a value for each|Pass loss_reduction"):
        measure(model, lambda: model(x).square().sum(1).topk(batch - 1).values.mean())


@every_size
def test_moments_of_the_batch_are_refused(batch, outputs, generator):
    model, x, _ = problem(batch, outputs, generator)
    with pytest.raises(UnsupportedTrainingError, match=r"may not hold a value for each|mixes its examples by Mm"):
        measure(model, lambda: (model(x).T @ model(x)).square().sum() / len(x))


EXACT = {  # of outputs and classes, all read
    "picked classes": lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "gathered classes": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).sum() / len(y),
    "one-hot classes": lambda out, y: -(out.log_softmax(1) * F.one_hot(y, out.shape[1])).sum() / len(y),
    "probabilities": lambda out, y: F.cross_entropy(out, F.one_hot(y, out.shape[1]).double()),
    "weighted examples": lambda out, y: (F.cross_entropy(out, y, reduction="none") * (1 + y)).mean(),
    "divergence": lambda out, y: F.kl_div(
        out.log_softmax(1), F.one_hot(y, out.shape[1]).double(), reduction="batchmean"
    ),
    "hinge": lambda out, y: F.multi_margin_loss(out, y),
    "largest": lambda out, y: out.logsumexp(1).sum() - out.max(1).values.sum(),
    "distance": lambda out, y: (out - 1).norm(dim=1).mean() + F.cosine_similarity(out, out.detach() + 1).mean(),
    "first output": lambda out, y: F.softplus(out[:, 0]).mean() + out[:, -1].squeeze().abs().mean(),
    "divided twice": lambda out, y: out.square().sum() / out.shape[1] / len(out),
    "frozen network behind": lambda out, y: torch.conv1d(out[:, None], torch.ones(2, 1, 2).double()).square().mean(),
}


@every_size
@pytest.mark.parametrize("name", EXACT)
def test_losses_by_hand_equal_the_loop(name, batch, outputs, generator):
    (model, x, _), loss = problem(batch, outputs, generator), EXACT[name]
    y = torch.randint(0, outputs, (batch,), generator=generator)
    measured = measure(model, lambda: loss(model(x), y))
    assert_right(measured, model, list(range(batch)), lambda m, i: loss(m(x[i : i + 1]), y[i : i + 1]))


@pytest.mark.parametrize("reduced", [lambda v: v.mean(), lambda v: v.sum()])
def test_a_penalty_does_not_count_without_measured_layers(reduced, generator):
    """Engines that measure gradients alone mark no layer in the graph."""
    model, x, y = problem(6, 3, generator)
    penalty = 0.1 * model.weight.square().sum() + sum(p.norm() for p in model.parameters())
    kind = "mean" if reduced(torch.ones(2)) == 1 else "sum"
    assert read_loss_scale(reduced((model(x) - y).square()) + penalty, batch_size=6).reduction == kind


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_only_the_graph_behind_the_last_layer_is_read_without_measured_layers(reduction, generator):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2000)))
    out = model(torch.randn(6, 4, generator=generator))
    assert read_loss_scale(F.mse_loss(out, out.detach() + 1, reduction=reduction), batch_size=6).reduction == reduction


def test_a_factor_that_may_be_a_count_is_asked_for_without_measured_layers(generator):
    model, x, y = problem(6, 3, generator)
    with pytest.raises(UnsupportedTrainingError, match="sum rescaled by"):
        read_loss_scale(((model(x) - y).square().mean(1) / 6).sum(), batch_size=6)


def test_a_loss_without_a_graph_has_no_loss_function_and_counts_as_a_mean():
    assert loss_functions(torch.tensor(1.0)) == set()
    assert read_loss_scale(torch.tensor(1.0), batch_size=6).reduction == "mean"


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_backward_that_is_not_the_losses_own_is_refused(engine, generator):
    model, x, y = problem(6, 3, generator)
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}

    def one_pass():
        with optimizer.sampled_params():
            torch.autograd.backward(F.mse_loss(model(x), y, reduction="sum"))

    with pytest.raises(UnsupportedTrainingError, match=r"Call loss\.backward\(\) instead of torch\.autograd\.backward"):
        one_pass()
    assert all(torch.equal(mean[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


class Doubled(nn.Module):
    """A layer whose second call leads nowhere, while its weight is used a second time by hand."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        first, second = self.layer(x), self.layer(x.tanh()).detach()
        return self.head(F.linear(first, self.layer.weight) + 0 * second.sum())


def test_uses_beside_a_layer_are_not_weighed_against_calls_that_lead_nowhere(generator):
    model, x = Doubled(), torch.randn(5, 4, generator=generator)
    y = torch.randint(0, 3, (5,), generator=generator)
    with pytest.warns(UserWarning, match=r"^layer\.weight: all examples share"):
        found = measure(model, lambda: F.cross_entropy(model(x), y))
    examples = list(zip(x.split(1), y.split(1), strict=True))
    _, square = one_example_at_a_time(model, examples, lambda m, e: F.cross_entropy(m(e[0]), e[1]))
    assert relative_error(found.curvature, square) < 1e-5
    with pytest.raises(BayesError):
        measure(model, lambda: F.cross_entropy(model(x), y), engine="backpack")
