"""Rules × situations × engines: each cell equals an autograd loop, or is refused by name.

A cell's model is ``head(layer(stem(x)))``. Its truth is one example at a time, in float64; for BatchNorm in training mode,
where examples have no gradient of their own, example i's term of the batch gradient. A new rule or situation is one line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error, terms_of_the_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes.curvature import measure
from lightning_bayes.optim.diagonal.vogn import VOGN


class First(nn.Module):
    """The first of several outputs of `inner`, called with `copies` of the input."""

    def __init__(self, inner: nn.Module, copies: int = 1):
        super().__init__()
        self.inner, self.copies = inner, copies

    def forward(self, x):
        return self.inner(*[x] * self.copies)[0]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.form = nn.Bilinear(4, 4, 3)

    def forward(self, x):
        return self.form(x, x.tanh())


class ScaleAndShift(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.scale * x + self.shift


RULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # the layer, and the shape of one example
    "Linear": (lambda: nn.Linear(4, 3), (4,)),
    "Linear, positions": (lambda: nn.Linear(4, 3), (2, 3, 4)),
    "Conv1d, circular": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, padding_mode="circular"), (4, 7)),
    "Conv2d, stride": (lambda: nn.Conv2d(4, 3, 3, stride=2, padding=1), (4, 6, 5)),
    "Conv2d, dilation": (
        lambda: nn.Conv2d(4, 6, 3, dilation=2, groups=2, padding=2, padding_mode="reflect"),
        (4, 5, 5),
    ),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same", padding_mode="replicate"), (4, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=(0, 1, 0), bias=False), (2, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (4, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, dilation=2), (4, 3, 2)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2, groups=2), (2, 2, 2, 2)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2, momentum=None), (2, 2, 3, 2)),
    "LayerNorm": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (4, 3, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(4, eps=1e-5), (3, 4)),
    "Embedding": (lambda: nn.Embedding(7, 4, padding_idx=2), (6,)),
    "PReLU": (lambda: nn.PReLU(4), (4, 3)),
    "Bilinear": (Pair, (4,)),
    "MultiheadAttention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), copies=3), (3, 4)),
    "LSTM": (lambda: First(nn.LSTM(4, 3, batch_first=True)), (3, 4)),
    "GRU": (lambda: First(nn.GRU(4, 3, batch_first=True)), (3, 4)),
    "scale and shift": (ScaleAndShift, (4,)),
}
FEW = ("Linear", "Conv2d, stride", "BatchNorm2d", "Embedding", "GRU")  # for situations that take long


def once(net, h):
    return net.layer(h)


def twice(net, h):
    return net.layer(h) * net.layer(h.flip(-1))


def tied(net, h):
    return net.layer(h) * net.twin(h.flip(-1))


def in_place_activation(net, h):
    return net.activation(net.layer(h))


def residual(net, h):
    out = net.layer(h)
    out += h.flatten(1).to(out.dtype).mean(1).reshape(-1, *[1] * (out.dim() - 1))
    return out


def two_forwards(net, h):
    return 2 * net.layer(h) - net.layer(h.tanh() if h.is_floating_point() else 6 - h)


def recomputed(net, h):
    return checkpoint(net.layer, h, use_reentrant=False)


def recomputed_reentrant(net, h):
    return checkpoint(net.layer, h, use_reentrant=True)


class Net(nn.Module):
    def __init__(self, rule: str, use: Callable[[Net, Tensor], Tensor]):
        super().__init__()
        build, shape = RULES[rule]
        self.layer, self.stem = build(), nn.Identity() if rule == "Embedding" else nn.PReLU()
        self.use, self.activation = use, nn.ReLU(inplace=True)
        if use is tied:
            self.twin = build()
            for inner, twin in zip(self.layer.modules(), self.twin.modules(), strict=True):
                twin._parameters.update(inner._parameters)
        x = torch.zeros(2, *shape, dtype=torch.long) if rule == "Embedding" else torch.randn(2, *shape)
        self.head = nn.Linear(self.eval().layer(x).flatten(1).shape[1], 3)
        for param in self.train().parameters():
            nn.init.normal_(param, std=0.5)
        nn.init.normal_(self.head.weight, std=0.1)  # far from certain: 1 - p has no digits left where p is almost one
        for name, buffer in self.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.use(self, self.stem(x)).flatten(1))


def summed(out, y):
    return F.cross_entropy(out, y, reduction="sum")


def masked(out, y):
    """The class weights the examples; the last class has weight 0."""
    return (F.cross_entropy(out, y, reduction="none") * torch.tensor([1.0, 0.5, 0.0])[y]).mean()


def by_measure(net, x, y, situation, engine):
    model = torch.compile(net, backend=situation.compiled) if situation.compiled else net

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=situation.autocast):
            return situation.loss(model(x), y)

    measured = measure(net, loss, engine=engine)
    return measured.grad, measured.curvature


def by_micro_batches(net, x, y, situation, engine):
    """Two micro-batches of different size under one sample of the weights, scaled as a GradScaler does."""
    optimizer = VOGN(net, lr=0.1, num_data=100, init_precision=1e3, engine=engine)
    mean = [p.detach().clone() for p in net.parameters()]
    for part in situation.parts:
        with optimizer.sampled_params(0, loss_scale=situation.scale):
            (situation.scale * situation.loss(net(x[part]), y[part])).backward()
            sample = {name: p.detach().clone() for name, p in net.named_parameters()}
    assert all(map(torch.equal, net.parameters(), mean))
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    _, *both = optimizer.collect()[0]  # the loss, all gradients, all curvatures, perhaps the examples of a sum
    net.load_state_dict(sample, strict=False)
    grads = {name: grad / situation.scale for name, grad in zip(named, both[: len(named)], strict=True)}
    return grads, dict(zip(named, both[len(named) : 2 * len(named)], strict=True))


@dataclass(frozen=True)
class Situation:
    use: Callable[[Net, Tensor], Tensor] = once
    plain: Callable[[Net, Tensor], Tensor] | None = None  # what the truth uses instead
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    measure: Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]] = by_measure
    labels: tuple[int, ...] = (0, 2, 1, 1, 0)
    parts: tuple[slice, ...] = (slice(None),)
    scale: float = 1.0
    training: bool = True
    frozen: bool = False
    autocast: bool = False
    compiled: str = ""
    rules: tuple[str, ...] = tuple(RULES)
    bound: float = 1e-5


FLOATS = tuple(rule for rule in RULES if rule != "Embedding")
NO_BATCH_NORM = tuple(rule for rule in RULES if "BatchNorm" not in rule)

SITUATIONS = {
    "plain": Situation(),
    "sum": Situation(loss=summed),
    "ignore_index": Situation(labels=(0, -100, 1, -100, 2)),
    "ignore_index and sum": Situation(loss=summed, labels=(0, -100, 1, -100, 2), rules=FEW),
    "masked": Situation(loss=masked),
    "module used twice": Situation(use=twice),
    "tied weights": Situation(use=tied),
    "two forwards": Situation(use=two_forwards),
    # Statistics of a micro-batch are its own, so its terms are not those of the whole batch.
    # Sums add up to that of the batch; means of parts of different sizes do not add up to its mean.
    "micro-batches": Situation(
        measure=by_micro_batches, loss=summed, parts=(slice(0, 3), slice(3, 5)), rules=NO_BATCH_NORM
    ),
    "micro-batches in evaluation": Situation(
        measure=by_micro_batches,
        loss=summed,
        parts=(slice(0, 3), slice(3, 5)),
        training=False,
        rules=("BatchNorm1d", "BatchNorm2d"),
    ),
    "loss scale": Situation(measure=by_micro_batches, scale=1024.0),
    "frozen weight": Situation(frozen=True),
    "evaluation": Situation(training=False),
    "checkpoint": Situation(use=recomputed, plain=once),
    "reentrant checkpoint": Situation(use=recomputed_reentrant, plain=once, rules=FLOATS),
    # bfloat16 carries 8 bits, 2⁻⁸ = 0.004; squares double the error and layers add theirs. Autocast knows no bilinear.
    "autocast": Situation(autocast=True, bound=0.05, rules=tuple(rule for rule in RULES if rule != "Bilinear")),
    "compiled": Situation(compiled="aot_eager", rules=FEW),
    "in-place activation": Situation(use=in_place_activation),
    "residual +=": Situation(use=residual),
    "one example": Situation(labels=(1,)),
}


# Cells that are refused by name: the error and its message.
REFUSED = {("BatchNorm1d", "one example"): (ValueError, "Expected more than 1 value per channel")}


def truth(net, x, y, situation):
    """Mean gradient and mean square over the examples with nonzero weight."""
    net, x = copy.deepcopy(net).double(), x.double() if x.is_floating_point() else x
    net.use = situation.plain or situation.use
    counted = [i for i in range(len(y)) if y[i] >= 0]
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in net.modules()):
        return one_example_at_a_time(net, counted, lambda m, i: situation.loss(m(x[i : i + 1]), y[i : i + 1]))
    scale = 1 if situation.loss is summed else len(counted)
    terms = terms_of_the_batch(net, lambda: situation.loss(net(x), y), len(x))
    # Examples with zero weight contribute through the batch statistics.
    each = {name: scale * term for name, term in terms.items()}
    n = len(counted)
    return {k: g.sum(0) / n for k, g in each.items()}, {k: g.square().sum(0) / n for k, g in each.items()}


CELLS = [
    pytest.param(rule, name, engine, id=f"{rule}-{name}-{engine}")
    for name, situation in SITUATIONS.items()
    for rule in situation.rules
    for engine in ("fused", "backpack")
]


def build_cell(rule, situation, generator):
    net = Net(rule, situation.use).train(situation.training)
    if situation.frozen:
        next(net.layer.parameters()).requires_grad_(False)
    shape = (len(situation.labels), *RULES[rule][1])
    x = (
        torch.randint(0, 7, shape, generator=generator)
        if rule == "Embedding"
        else torch.randn(shape, generator=generator)
    )
    return net, x, torch.tensor(situation.labels)


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torch says that CPU autocast has no float32 op list entry
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch on RMSNorm under autocast
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks
@pytest.mark.parametrize(("rule", "name", "engine"), CELLS)
def test_cell_equals_the_loop_or_is_refused(rule, name, engine, generator):
    situation = SITUATIONS[name]
    net, x, y = build_cell(rule, situation, generator)
    if (rule, name) in REFUSED:
        error, match = REFUSED[rule, name]
        before = {key: value.clone() for key, value in net.named_parameters()}
        with pytest.raises(error, match=match):
            situation.measure(net, x, y, situation, engine)
        assert all(torch.equal(p, before[key]) for key, p in net.named_parameters())
        return
    grad, square = situation.measure(net, x, y, situation, engine)
    true_grad, true_square = truth(net, x, y, situation)
    # The mean gradient in units of per-example gradients, because those may cancel.
    size = {key: value.sqrt() for key, value in true_square.items()}
    found = {key: value - true_grad[key] + size[key] for key, value in grad.items()}
    assert relative_error(found, size) < situation.bound
    assert relative_error(square, true_square) < situation.bound


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch on vmap, the truth here
@pytest.mark.parametrize("rule", [rule for rule in RULES if "BatchNorm" not in rule and rule not in {"LSTM", "GRU"}])
def test_plain_cell_equals_torch_func(rule, generator):
    """BatchNorm mixes examples, and recurrent layers have no batching rule."""
    net, x, y = build_cell(rule, SITUATIONS["plain"], generator)
    measured = measure(net, lambda: F.cross_entropy(net(x), y))
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p, one_x, one_y):
        return F.cross_entropy(torch.func.functional_call(net, p, (one_x[None],)), one_y[None])

    if isinstance(net.layer, nn.InstanceNorm2d):
        net.layer.running_mean = net.layer.running_var = None  # which vmap cannot update
    each = torch.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)
    assert relative_error(measured.grad, {k: g.mean(0) for k, g in each.items()}) < 1e-5
    assert relative_error(measured.curvature, {k: g.square().mean(0) for k, g in each.items()}) < 1e-5
