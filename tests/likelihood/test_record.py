"""The likelihood that a step's calls tell: the log-likelihood of what was read is the loss that the step computed."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes.likelihood import Bernoulli, Categorical, Gaussian, Poisson, PredictedGaussian, Raw, Targets
from lightning_bayes.likelihood.record import StepRecorder

B, T, C = 6, 5, 3
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, C, (B, T), generator=GENERATOR)
VOID = TOKENS.clone()
VOID[:, 3:] = 255
X = torch.randn(B, T, 4, generator=GENERATOR)
VALUES = torch.randn(B, 2, generator=GENERATOR)
MISSING = torch.where(torch.tensor([[True, False]] * 3 + [[True, True]] * 3), VALUES, math.nan)


def recorded(net, batch, step):
    """The likelihood, the batch as read, and the loss."""
    recorder = StepRecorder(net)
    recorder.start(batch)
    try:
        loss = step(net, batch)
        return recorder.likelihood(loss), recorder.read(loss), float(loss.detach())
    finally:
        recorder.stop()


def mean_nll(read, std=None):
    """The mean of -log p over the targets that count."""
    kind = Gaussian(std) if std else read.scored.kind
    values = -kind.log_prob(read.outputs, read.targets).detach()
    return float(values[read.mask].mean() if read.mask is not None else values.mean())


ON_TOKENS = {  # step, targets in the batch, dimension of the classes, ignored targets
    "flattened": (lambda f, y: F.cross_entropy(f.reshape(-1, C), y.flatten()), TOKENS, Targets((1,), -100.0)),
    "transposed": (lambda f, y: F.cross_entropy(f.transpose(1, 2), y), TOKENS, Targets((1,), -100.0)),
    "permuted": (lambda f, y: F.cross_entropy(f.permute(1, 2, 0), y.T), TOKENS, Targets((1,), -100.0)),
    "in double precision": (
        lambda f, y: F.cross_entropy(f.double().flatten(0, 1), y.flatten()),
        TOKENS,
        Targets((1,), -100.0),
    ),
    "ignored": (lambda f, y: F.cross_entropy(f.mT, y, ignore_index=255), VOID, Targets((1,), 255.0)),
    "selected by the void class": (lambda f, y: F.cross_entropy(f[y < 255], y[y < 255]), VOID, Targets((1,), 255.0)),
    "selected by a mask": (lambda f, y: F.cross_entropy(f[MASK], y[MASK]), TOKENS, Targets((1,), -100.0, True)),
    "multiplied by a mask": (
        lambda f, y: (F.cross_entropy(f.mT, y, reduction="none") * MASK).sum() / MASK.sum(),
        TOKENS,
        Targets((1,), -100.0, True),
    ),
    "shifted": (lambda f, y: F.cross_entropy(f[:, :-1].flatten(0, 1), y[:, 1:].flatten()), TOKENS, Targets()),
    "log-probabilities": (
        lambda f, y: F.nll_loss(f.log_softmax(-1).flatten(0, 1), y.flatten()),
        TOKENS,
        Targets((1,), -100.0),
    ),
    "weighed by hand": (
        lambda f, y: -(F.one_hot(y, C) * F.log_softmax(f, -1)).sum(-1).mean(),
        TOKENS,
        Targets((1,)),
    ),
}
MASK = torch.rand(B, T, generator=GENERATOR) < 0.5


@pytest.mark.parametrize("name", ON_TOKENS)
def test_classes_and_targets_of_tokens_are_found(name):
    loss, targets, expected = ON_TOKENS[name]
    likelihood, batch, value = recorded(nn.Linear(4, C), (X, targets), lambda net, b: loss(net(b[0]), b[1]))
    (scored,), (read,) = likelihood.outputs, batch.of_step
    assert scored.kind.state() == Categorical(-1).state()
    assert scored.targets == expected
    assert mean_nll(read) == pytest.approx(value, rel=1e-5)


OF_VALUES = {
    "squared error": (lambda f, y: F.mse_loss(f, y), VALUES, Gaussian(), Targets((1,))),
    "one of two columns": (lambda f, y: F.mse_loss(f[:, 1], y[:, 1]), VALUES, Gaussian(), Targets((1,), None, True)),
    "missing": (lambda f, y: F.mse_loss(f[~y.isnan()], y[~y.isnan()]), MISSING, Gaussian(), Targets((1,), math.nan)),
    "standardised": (lambda f, y: F.mse_loss(f, (y - 1) / 2), VALUES, Gaussian(), Targets()),
    "labels": (
        lambda f, y: F.binary_cross_entropy_with_logits(f, y, pos_weight=torch.tensor([2.0, 3.0])),
        (VALUES > 0).float(),
        Bernoulli([2.0, 3.0]),
        Targets((1,)),
    ),
    "probabilities": (
        lambda f, y: F.binary_cross_entropy(f.sigmoid(), y),
        (VALUES > 0).float(),
        Bernoulli(),
        Targets((1,)),
    ),
    "counts": (lambda f, y: F.poisson_nll_loss(f, y), VALUES.abs().round(), Poisson(), Targets((1,))),
    "absolute error": (lambda f, y: F.l1_loss(f, y), VALUES, None, Targets((1,))),
}


@pytest.mark.parametrize("name", OF_VALUES)
def test_the_kind_of_values_is_that_of_their_loss(name):
    loss, targets, kind, expected = OF_VALUES[name]
    likelihood, batch, value = recorded(nn.Linear(4, 2), (X[:, 0], targets), lambda net, b: loss(net(b[0]), b[1]))
    (scored,), (read,) = likelihood.outputs, batch.of_step
    assert isinstance(scored.kind, Raw) if kind is None else scored.kind.state() == kind.state()
    assert str(scored.targets) == str(expected)  # nan differs from nan
    if isinstance(kind, Gaussian):  # with variance ½, -log p = |f - y|² + log(π)/2
        assert mean_nll(read, 0.5**0.5) - math.log(math.pi) / 2 == pytest.approx(value, rel=1e-5)


UNKNOWN = {
    "in other units": lambda f, y: F.mse_loss(3 * f + 1, y),
    "of differences": lambda f, y: F.mse_loss(f.cumsum(1), y),
    "with a penalty": lambda f, y: F.mse_loss(f, y) + 1e-3 * f.abs().mean(),
    "two kinds": lambda f, y: F.mse_loss(f, y) + F.poisson_nll_loss(f, y.abs()),
    "of similarities": lambda f, y: F.cross_entropy(f @ f.T, torch.arange(B)),
    "scaled logits": lambda f, y: F.cross_entropy(20 * f, (y[:, 0] > 0).long()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_functions_of_an_output_say_nothing_of_it(name):
    likelihood, _, _ = recorded(nn.Linear(4, 2), (X[:, 0], VALUES), lambda net, b: UNKNOWN[name](net(b[0]), b[1]))
    assert not likelihood.outputs


FORMS = {
    "variance": (lambda s: s.square() + 0.1, lambda s: s),
    "log_variance": (lambda s: s, torch.exp),
    "std": (lambda s: s.square() + 0.1, torch.square),
    "log_std": (lambda s: s, lambda s: (2 * s).exp()),
    "softplus_variance": (lambda s: s, F.softplus),
}


class Moments(nn.Module):
    """Mean and noise in one output, or in a dictionary."""

    def __init__(self, form, in_one):
        super().__init__()
        self.net, self.form, self.in_one = nn.Linear(4, 4), form, in_one

    def forward(self, x):
        mean, noise = self.net(x).chunk(2, -1)
        noise = self.form(noise)
        return torch.cat([mean, noise], -1) if self.in_one else {"noise": noise, "mean": mean}


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_predicted_variance_is_found(name, in_one):
    form, variance = FORMS[name]

    def step(net, batch):
        f = net(batch[0])
        mean, noise = f.chunk(2, -1) if in_one else (f["mean"], f["noise"])
        return F.gaussian_nll_loss(mean, batch[1], variance(noise), full=True, eps=1e-12)

    likelihood, batch, value = recorded(Moments(form, in_one), (X[:, 0], VALUES), step)
    (scored,), (read,) = likelihood.outputs, batch.of_step
    assert scored.kind.state() == PredictedGaussian(name).state()
    assert scored.paths == (((),) if in_one else (("mean",), ("noise",)))
    assert scored.targets == Targets((1,))
    assert mean_nll(read) == pytest.approx(value, rel=1e-4)


Heads = namedtuple("Heads", "label value")


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


class TwoHeads(nn.Module):
    """Classes and values from one representation, in several structures."""

    def __init__(self, structure):
        super().__init__()
        self.body, self.label, self.value, self.structure = nn.Linear(4, 8), nn.Linear(8, C), nn.Linear(8, 2), structure

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.structure(self.label(hidden), self.value(hidden))


STRUCTURES = {
    "tuple": (lambda a, b: (a, b), (0,), (1,)),
    "dictionary": (lambda a, b: {"label": a, "value": b}, ("label",), ("value",)),
    "named tuple": (Heads, (0,), (1,)),
    "nested": (lambda a, b: {"heads": [a, {"value": b}]}, ("heads", 0), ("heads", 1, "value")),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_head_has_its_own_likelihood(name):
    structure, first, second = STRUCTURES[name]

    def step(net, batch):
        a, b = (leaf for leaf in _leaves(net(batch["x"])))
        return F.cross_entropy(a, batch["label"]) + 0.3 * F.mse_loss(b, batch["value"])

    batch = {"x": X[:, 0], "label": TOKENS[:, 0], "value": VALUES}
    likelihood, read, _ = recorded(TwoHeads(structure), batch, step)
    of_label, of_value = likelihood.of(first), likelihood.of(second)
    assert isinstance(of_label.kind, Categorical)
    assert isinstance(of_value.kind, Gaussian)
    assert (of_label.targets.path, of_value.targets.path) == (("label",), ("value",))
    assert likelihood.inputs.args == (("path", ("x",)),)
    assert len(read.of_step) == 2


def _leaves(value):
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for child in value.values() if isinstance(value, dict) else value:
            yield from _leaves(child)


class Pretrained(nn.Module):
    """Computes its loss itself, and is called with a whole batch by keywords."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, C)

    def forward(self, inputs, labels=None, attention_mask=None, return_dict=False):
        hidden = self.body(inputs).tanh()
        logits = self.head(hidden)
        return Output(F.cross_entropy(logits.view(-1, C), labels.view(-1)), logits, hidden)


def test_a_loss_among_the_outputs_is_that_of_its_logits():
    batch = {"inputs": X, "labels": torch.where(MASK, TOKENS, -100), "attention_mask": MASK}
    likelihood, read, value = recorded(Pretrained(), batch, lambda net, b: net(**b, return_dict=True).loss)
    (scored,) = likelihood.outputs
    assert (scored.paths, scored.targets) == ((("logits",),), Targets(("labels",), -100.0))
    assert mean_nll(read.of_step[0]) == pytest.approx(value, rel=1e-5)
    args, kwargs = likelihood.inputs.of({"inputs": X})
    assert args == ()
    assert kwargs == {"inputs": X, "return_dict": True}


class Two(nn.Module):
    """Takes two inputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def forward(self, x, z, scale=1.0):
        return self.net(torch.cat([x, z], -1))


def test_two_inputs_are_passed_as_the_step_passes_them():
    batch = [{"x": X[:, 0], "more": [X[:, 1]]}, VALUES]
    step = lambda net, b: F.mse_loss(net(b[0]["x"], z=b[0]["more"][0], scale=2.0), b[1])  # noqa: E731
    likelihood, _, _ = recorded(Two(), batch, step)
    args, kwargs = likelihood.inputs.of(batch)
    assert args[0] is X[:, 0] or torch.equal(args[0], X[:, 0])
    assert kwargs.keys() == {"z", "scale"}
    assert likelihood.outputs[0].targets.path == (1,)


def test_computed_inputs_are_unknown_and_shown_by_the_step():
    likelihood, read, _ = recorded(nn.Linear(4, 2), (X[:, 0], VALUES), lambda net, b: F.mse_loss(net(b[0] + 1), b[1]))
    assert likelihood.inputs is None
    torch.testing.assert_close(read.arguments[0][0], X[:, 0] + 1)


def test_focal_and_weighted_losses_depart_from_the_likelihood():
    def focal(f, y):
        nll = F.cross_entropy(f, y, reduction="none")
        return ((1 - (-nll).exp()) * nll).mean()

    weights = torch.rand(B, generator=torch.Generator().manual_seed(1))
    weighted = lambda f, y: (weights * F.cross_entropy(f, y, reduction="none")).mean()  # noqa: E731
    for loss, departs in ((focal, "function"), (weighted, "weights")):
        batch = X[:, 0], TOKENS[:, 0]
        likelihood, read, value = recorded(nn.Linear(4, C), batch, lambda net, b, loss=loss: loss(net(b[0]), b[1]))
        assert likelihood.outputs[0].departs == departs
    nll = -read.of_step[0].scored.kind.log_prob(read.of_step[0].outputs, read.of_step[0].targets).detach()
    assert float((read.of_step[0].weights * nll).mean() * weights.mean()) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_found_in_half_precision(dtype):
    tokens = torch.randint(0, 50, (40, 30), generator=torch.Generator().manual_seed(2))
    x = torch.randn(40, 30, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    step = lambda net, b: F.cross_entropy(net(b[0])[:, 1:].flatten(0, 1).float(), b[1][:, :-1].flatten())  # noqa: E731
    likelihood, batch, value = recorded(nn.Linear(4, 50).to(dtype), (x, tokens), step)
    assert likelihood.outputs[0].kind.dim == -1
    read = batch.of_step[0]
    assert torch.equal(read.targets[:, 1:], tokens[:, :-1])
    assert mean_nll(read._replace(outputs=read.outputs.float())) == pytest.approx(value, rel=1e-3)
