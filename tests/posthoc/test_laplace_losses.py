"""The curvature of each kind of loss against explicit Jacobians and the Hessian of the loss that torch computes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from lightning_bayes.errors import DataError, HyperparameterError, UnsupportedTrainingError
from lightning_bayes.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    Inputs,
    Likelihood,
    Poisson,
    PredictedGaussian,
    Raw,
    ReadOutput,
    ScoredOutput,
    Targets,
)
from lightning_bayes.posthoc import laplace

F64 = torch.float64
N, T, DELTA = 9, 4, 0.5


class Network(nn.Module):
    """Outputs ``[B, columns]``, or ``[B, T, columns]`` for inputs ``[B, T, 3]``."""

    def __init__(self, columns, shaped=lambda f: f):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.shaped = nn.Linear(3, 4), nn.Linear(4, columns), shaped
        self.double()

    def forward(self, x):
        return self.shaped(self.head(self.body(x).tanh()))


class Case(NamedTuple):
    """A network, its likelihood, targets, and the loss summed over examples as torch computes it."""

    net: nn.Module
    likelihood: Any
    targets: torch.Tensor
    loss: Any
    tokens: bool = False


def drawn(*shape, seed=0, high=None):
    generator = torch.Generator().manual_seed(seed)
    if high is not None:
        return torch.randint(high, shape, generator=generator)
    return torch.randn(*shape, generator=generator, dtype=F64)


def with_missing(values):
    values = values.clone()
    values[torch.rand(values.shape, generator=torch.Generator().manual_seed(5)) < 0.4] = math.nan
    return values


def observed_squares(f, y, std):
    residuals = torch.where(y.isnan(), 0.0, f - y.nan_to_num())
    return (residuals.square() / (2 * std**2)).sum()


def ignoring(value, share=0.4):
    labels = drawn(N, T, high=3)
    labels[torch.rand(N, T, generator=torch.Generator().manual_seed(6)) < share] = value
    return labels


WEIGHT = torch.tensor([0.5, 2.0, 7.0], dtype=F64)
OMEGA = torch.tensor([5.0, 0.5], dtype=F64)
STD = torch.tensor([0.3, 2.0], dtype=F64)
LABELS, SOFT = drawn(N, high=3), drawn(N, 3).softmax(1)
MULTI = drawn(N, 2, high=2).double()


def at(ignored=None, path=(1,)):
    return Targets(path, ignored)


def likelihood_of(kind, ignored):
    return Likelihood((ScoredOutput(((),), kind, at(ignored)),), Inputs((("path", (0,)),)))


def weighted_mean(f, y, **options):
    """N times the mean of torch: a sum whose weights have the mean 1."""
    return len(y) * F.cross_entropy(f, y, WEIGHT, **options)


CASES = {
    "classes": Case(Network(3), "classification", LABELS, lambda f, y: F.cross_entropy(f, y, reduction="sum")),
    "class weights": Case(Network(3), Categorical(weight=WEIGHT.tolist()), LABELS, weighted_mean),
    "class weights, summed": Case(
        Network(3),
        Categorical(weight=WEIGHT.tolist(), is_weighted_mean=False),
        LABELS,
        lambda f, y: F.cross_entropy(f, y, WEIGHT, reduction="sum"),
    ),
    "label smoothing": Case(
        Network(3),
        Categorical(label_smoothing=0.3),
        LABELS,
        lambda f, y: F.cross_entropy(f, y, label_smoothing=0.3, reduction="sum"),
    ),
    "class weights and smoothing": Case(
        Network(3),
        Categorical(weight=WEIGHT.tolist(), label_smoothing=0.3),
        LABELS,
        lambda f, y: weighted_mean(f, y, label_smoothing=0.3),
    ),
    "soft labels": Case(Network(3), "classification", SOFT, lambda f, y: F.cross_entropy(f, y, reduction="sum")),
    "soft labels and class weights": Case(
        Network(3),
        Categorical(weight=WEIGHT.tolist()),
        SOFT,
        lambda f, y: F.cross_entropy(f, y, WEIGHT, reduction="sum"),
    ),
    "labels": Case(Network(2), "binary", MULTI, lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum")),
    "pos_weight": Case(
        Network(2),
        Bernoulli(OMEGA.tolist()),
        MULTI,
        lambda f, y: F.binary_cross_entropy_with_logits(f, y, pos_weight=OMEGA, reduction="sum"),
    ),
    "labels, some missing": Case(
        Network(2),
        "multilabel",
        with_missing(MULTI),
        lambda f, y: F.binary_cross_entropy_with_logits(f[~y.isnan()], y[~y.isnan()], reduction="sum"),
    ),
    "counts": Case(
        Network(2), "counts", drawn(N, 2, high=5).double(), lambda f, y: F.poisson_nll_loss(f, y, reduction="sum")
    ),
    "values of known noise": Case(
        Network(2), Gaussian(STD.tolist()), drawn(N, 2), lambda f, y: observed_squares(f, y, STD)
    ),
    "values, some missing": Case(
        Network(2), Gaussian(STD.tolist()), with_missing(drawn(N, 2)), lambda f, y: observed_squares(f, y, STD)
    ),
    "tokens": Case(
        Network(3),
        Categorical(-1),
        drawn(N, T, high=3),
        lambda f, y: F.cross_entropy(f.transpose(1, 2), y, reduction="sum"),
        tokens=True,
    ),
    "tokens, classes second": Case(
        Network(3, lambda f: f.transpose(1, 2)),
        "classification",
        drawn(N, T, high=3),
        lambda f, y: F.cross_entropy(f, y, reduction="sum"),
        tokens=True,
    ),
    **{
        f"tokens, {ignored} ignored": Case(
            Network(3),
            likelihood_of(Categorical(-1), ignored),
            ignoring(ignored),
            lambda f, y, ignored=ignored: F.cross_entropy(f.transpose(1, 2), y, ignore_index=ignored, reduction="sum"),
            tokens=True,
        )
        for ignored in (-100, -1, 255)
    },
    "tokens with class weights, -1 ignored": Case(
        Network(3),
        likelihood_of(Categorical(-1, WEIGHT.tolist(), 0.1), -1),
        ignoring(-1),
        lambda f, y: (
            (y >= 0).sum() * F.cross_entropy(f.transpose(1, 2), y, WEIGHT, ignore_index=-1, label_smoothing=0.1)
        ),
        tokens=True,
    ),
}


def inputs_of(case):
    return drawn(N, T, 3, seed=1) if case.tokens else drawn(N, 3, seed=1)


def jacobian(net, *inputs):
    """∂f/∂θ of all outputs of one example, ``[outputs, D]``."""
    outputs = net(*inputs)
    grads = [torch.autograd.grad(v, list(net.parameters()), retain_graph=True) for v in outputs.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads])


def ggn(net, x, hessian_of):
    """Σ_i J_iᵀ H_i J_i, with the Hessian ``[B, outputs, outputs]`` of the loss."""
    total = 0.0
    for index in range(len(x)):
        rows = jacobian(net, x[index : index + 1])
        total = total + rows.mT @ hessian_of[index] @ rows
    return total


def hessians(loss, outputs, y):
    """∂²ℓ/∂f² of each example by autograd; the loss of all examples together may have a common factor."""
    size = outputs[0].numel()
    whole = torch.autograd.functional.hessian(lambda f: loss(f, y), outputs).reshape(len(y), size, len(y), size)
    return torch.stack([whole[index, :, index] for index in range(len(y))])


def curvature(net, batches, likelihood, structure="full", **options):
    found = laplace(
        net.eval(), batches, likelihood, structure, "all", prior_precision=DELTA, require_trained=False, **options
    )
    if structure == "full":
        return found.posterior.precision - DELTA * torch.eye(len(found.posterior.precision), dtype=F64)
    return torch.cat([found.posterior.precision[name].flatten() for name in found.posterior.mean]) - DELTA


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("name", CASES)
def test_the_curvature_is_that_of_the_loss(name, structure):
    case = CASES[name]
    x, y = inputs_of(case), case.targets
    expected = ggn(case.net, x, hessians(case.loss, case.net(x).detach(), y))
    found = curvature(case.net, [(x[:5], y[:5]), (x[5:], y[5:])], case.likelihood, structure)
    torch.testing.assert_close(found, expected if structure == "full" else expected.diagonal())


@pytest.mark.parametrize("name", ["classes", "labels", "counts", "labels, some missing", "tokens, -1 ignored"])
def test_drawn_labels_estimate_it(name):
    case = CASES[name]
    x, y = inputs_of(case), case.targets
    expected = ggn(case.net, x, hessians(case.loss, case.net(x).detach(), y))
    found = curvature(case.net, [(x, y)], case.likelihood, curvature="fisher", mc_samples=600)
    assert float((found - expected).norm() / expected.norm()) < 0.15


@pytest.mark.parametrize(
    "name", ["class weights and smoothing", "pos_weight", "values, some missing", "tokens, -1 ignored"]
)
def test_the_empirical_fisher_has_the_gradients_of_the_loss(name):
    case = CASES[name]
    x, y = inputs_of(case), case.targets
    outputs = case.net(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(case.loss(outputs, y), outputs)
    rows = torch.stack([gradient[i].flatten() @ jacobian(case.net, x[i : i + 1]) for i in range(N)])
    found = curvature(case.net, [(x, y)], case.likelihood, curvature="empirical_fisher")
    torch.testing.assert_close(found, rows.mT @ rows)


# -- mean and variance -----------------------------------------------------------------------------------

FORMS = {
    "variance": lambda s: s,
    "log_variance": torch.exp,
    "std": torch.square,
    "log_std": lambda s: (2 * s).exp(),
    "softplus_variance": F.softplus,
    "softplus_std": lambda s: F.softplus(s).square(),
}


def expected_hessians(outputs, variance_of, targets):
    """E_y ∂²(-log p)/∂f² by Gauss-Hermite quadrature, exact for the quadratic function of y; 0 for missing targets."""
    mean, variance = outputs[:, :2], variance_of(outputs[:, 2:])
    nodes = torch.tensor([-math.sqrt(3), 0.0, math.sqrt(3)], dtype=F64)
    total = 0.0
    for node, weight in zip(nodes, (1 / 6, 2 / 3, 1 / 6), strict=True):
        y = mean + node * variance.sqrt()

        def loss(f, _, y=y):
            log_prob = Normal(f[:, :2], variance_of(f[:, 2:]).sqrt(), validate_args=False).log_prob(y)
            return -log_prob[~targets.isnan()].sum()

        total = total + weight * hessians(loss, outputs, y)
    return total


@pytest.mark.parametrize("leaves", ["one tensor", "a pair", "a dictionary"])
@pytest.mark.parametrize("form", FORMS)
def test_networks_that_predict_their_noise(form, leaves):
    def positive(f):
        return torch.cat([f[:, :2], f[:, 2:].square() + 0.3], 1)

    def shaped(f):
        return positive(f) if form in {"variance", "std"} else f

    def returned(f):
        mean, second = shaped(f).chunk(2, 1)
        return {"one tensor": shaped(f), "a pair": (mean, second), "a dictionary": {"mean": mean, "s": second}}[leaves]

    paths = {"one tensor": ((),), "a pair": ((0,), (1,)), "a dictionary": (("mean",), ("s",))}[leaves]
    net, together = Network(4, returned), Network(4, shaped)
    x, y = drawn(N, 3, seed=1), with_missing(drawn(N, 2))
    likelihood = Likelihood((ScoredOutput(paths, PredictedGaussian(form), at(math.nan)),), Inputs((("path", (0,)),)))
    expected = ggn(together, x, expected_hessians(together(x).detach(), FORMS[form], y))
    torch.testing.assert_close(curvature(net, [(x[:4], y[:4]), (x[4:], y[4:])], likelihood), expected)


# -- inputs and outputs ----------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, wrap=lambda f: f):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.head, self.wrap = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3), wrap
        self.double()

    def forward(self, x, z, scale=1.0):
        return self.wrap(self.head((self.one(x) + scale * self.other(z)).tanh()))


@pytest.mark.parametrize(
    ("batch_of", "inputs", "targets"),
    [
        (lambda x, z, y: (x, z, y), Inputs((("path", (0,)), ("path", (1,)))), at(path=(2,))),
        (lambda x, z, y: ((x, z), y), Inputs((("path", (0, 0)), ("path", (0, 1)))), at()),
        (
            lambda x, z, y: {"x": x, "z": z, "labels": y},
            Inputs((("path", ("x",)),), {"z": ("path", ("z",)), "scale": ("value", 1.0)}),
            at(path=("labels",)),
        ),
    ],
    ids=["a triple", "a pair of inputs", "a dictionary"],
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_batches_are_read_as_the_likelihood_tells(batch_of, inputs, targets, nested, subset):
    net = Two((lambda f: {"other": f.sum(1), "logits": f}) if nested else (lambda f: f))
    x, z, y = drawn(N, 3), drawn(N, 2, seed=2), LABELS
    likelihood = Likelihood((ScoredOutput(((("logits",) if nested else ()),), Categorical(), targets),), inputs)
    batches = [batch_of(x[:5], z[:5], y[:5]), batch_of(x[5:], z[5:], y[5:])]
    found = laplace(net, batches, likelihood, "full", subset, prior_precision=DELTA, require_trained=False).posterior
    plain = Two()
    probs, total = plain(x, z).softmax(1).detach(), 0.0
    for index in range(N):
        rows = jacobian(plain, x[index : index + 1], z[index : index + 1])
        total = total + rows.mT @ (probs[index].diag() - torch.outer(probs[index], probs[index])) @ rows
    size = len(found.precision)
    torch.testing.assert_close(found.precision, total[-size:, -size:] + DELTA * torch.eye(size, dtype=F64))


# -- the noise of a regression ---------------------------------------------------------------------------


def test_each_output_of_a_regression_has_its_own_noise():
    x = drawn(400, 3, seed=1)
    net = Network(2)
    y = net(x).detach() + torch.tensor([0.02, 1.0], dtype=F64) * drawn(400, 2, seed=2)
    for structure in ("full", "kronecker", "diagonal"):
        found = laplace(net, [(x[:150], y[:150]), (x[150:], y[150:])], "regression", structure)
        torch.testing.assert_close(torch.tensor(found.likelihood.std), torch.tensor([0.02, 1.0]), rtol=0.1, atol=0)
        known = laplace(
            net, [(x, y)], found.likelihood, structure, prior_precision=next(iter(found.prior_precision.values()))
        )
        torch.testing.assert_close(
            {k: v.double() for k, v in known.posterior.variance().items()},
            {k: v.double() for k, v in found.posterior.variance().items()},
            rtol=1e-4,
            atol=0,
        )
        assert known.log_marginal_likelihood == pytest.approx(found.log_marginal_likelihood, rel=1e-6)


def test_noises_follow_the_observed_targets_alone():
    x, net = drawn(400, 3, seed=1), Network(2)
    y = net(x).detach() + torch.tensor([0.02, 1.0], dtype=F64) * drawn(400, 2, seed=2)
    y[::2, 0] = math.nan
    found = laplace(net, [(x, y)], "regression", "full")
    torch.testing.assert_close(torch.tensor(found.likelihood.std), torch.tensor([0.02, 1.0]), rtol=0.1, atol=0)


def test_sequences_of_any_length_have_one_noise_for_each_column():
    net = Network(2)
    batches = []
    for seed, length in enumerate((3, 5, 8)):
        x = drawn(60, length, 3, seed=seed)
        noise = torch.tensor([0.05, 1.0], dtype=F64) * drawn(60, length, 2, seed=seed + 10)
        batches.append((x, net(x).detach() + noise))
    found = laplace(net, batches, "regression", "full")
    torch.testing.assert_close(torch.tensor(found.likelihood.std), torch.tensor([0.05, 1.0]), rtol=0.1, atol=0)
    images = Network(2, lambda f: f[:, :, None, None].expand(-1, -1, 4, 4))
    x = drawn(40, 3)
    one = laplace(images, [(x, images(x).detach() + drawn(40, 2, 4, 4))], "regression", "full", require_trained=False)
    assert one.likelihood.std == pytest.approx(1, rel=0.1)


def test_the_search_on_validation_data_leaves_out_what_does_not_count():
    net, x = Network(3), drawn(40, T, 3, seed=1)
    nn.init.normal_(net.head.weight, 0, 3, generator=torch.Generator().manual_seed(0))
    probs = (net(x).detach() / 3).softmax(-1)  # the network is overconfident, which a posterior mends
    y = torch.multinomial(probs.flatten(0, 1), 1, generator=torch.Generator().manual_seed(1)).view(40, T)
    held_out = torch.where(torch.arange(40)[:, None] % 2 == 0, y, -1)
    options = {"structure": "full", "subset": "all", "prior_precision": "validation", "require_trained": False}
    one, other = (
        laplace(net, [(x, y)], likelihood_of(Categorical(-1), -1), **options, validation=[pair])
        for pair in ((x, held_out), (x[::2], y[::2]))
    )
    assert one.prior_precision == pytest.approx(other.prior_precision, rel=1e-6)


def test_data_without_a_target_that_counts_are_refused():
    case = CASES["tokens, -1 ignored"]
    batch = inputs_of(case), torch.full_like(case.targets, -1)
    with pytest.raises(DataError, match="No target of the training data counts"):
        curvature(case.net, [batch], case.likelihood)


# -- refusals --------------------------------------------------------------------------------------------


def test_what_has_no_curvature_is_refused_by_name():
    x = drawn(N, 3)
    with pytest.raises(HyperparameterError, match=r"not known: l1_loss has longer tails\. Pass likelihood='classif"):
        laplace(Network(1), [(x, x[:, :1])], Raw("l1_loss has longer tails"))
    scored = ScoredOutput(((),), Gaussian(1.0), at())
    with pytest.raises(UnsupportedTrainingError, match="The loss has 2 terms on the outputs"):
        laplace(Network(1), [(x, x[:, :1])], Gaussian(1.0), read=lambda batch: [ReadOutput(scored, x, x)] * 2)


def test_infinite_targets_are_refused():
    x = drawn(N, 3)
    y = x[:, :1].clone()
    y[2] = math.inf
    with pytest.raises(DataError, match="1 of the 9 targets of a batch are infinite"):
        laplace(Network(1), [(x, y)], Gaussian(1.0))


def test_poisson_rates_have_the_curvature_of_rates():
    net = Network(2, F.softplus)
    x, y = drawn(N, 3, seed=1), drawn(N, 2, high=5).double()
    rate = net(x).detach()
    expected = ggn(net, x, torch.diag_embed(1 / rate))  # E_y ∂²/∂λ² (λ - y log λ) = E y/λ² = 1/λ
    torch.testing.assert_close(curvature(net, [(x, y)], Poisson(is_log=False)), expected)


def ignored_tokens():
    """Tokens of which some are ignored, and the others as examples of their own."""
    x, y = torch.randn(N, T, 3, dtype=F64, generator=torch.Generator().manual_seed(1)), drawn(N, T, high=3)
    kept = drawn(N, T, seed=2) > -0.4
    assert 0.3 < kept.double().mean() < 0.9
    return [(x, torch.where(kept, y, -100))], [(x[kept], y[kept])]


@pytest.mark.parametrize("batch_size", [N, 4])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_kronecker_factors_are_those_of_the_tokens_that_count(subset, batch_size):
    """Rows of other tokens are no part of the inputs' factor, and its mean is over the rows that are."""
    ((x, y),), alone = ignored_tokens()
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    options = {"subset": subset, "prior_precision": DELTA, "require_trained": False}
    found = laplace(Network(3), batches, Categorical(-1), "kronecker", **options)
    wanted = laplace(Network(3), alone, Categorical(1), "kronecker", **options)
    assert found.log_marginal_likelihood == pytest.approx(wanted.log_marginal_likelihood, rel=1e-9)
    for name, variance in wanted.posterior.variance().items():
        torch.testing.assert_close(found.posterior.variance()[name], variance)


def test_kronecker_factors_of_one_counted_target_are_exact():
    """With one row, O ⊗ I is the matrix itself: against explicit Jacobians, without the bias, whose block is separate."""
    net = nn.Linear(3, 2, bias=False, dtype=F64)
    x, y = torch.randn(N, 3, dtype=F64, generator=torch.Generator().manual_seed(1)), torch.full((N,), -100)
    y[2] = 1
    options = {"prior_precision": DELTA, "require_trained": False, "subset": "all"}
    posterior = laplace(net, [(x, y)], Categorical(1), "kronecker", **options).posterior
    probs, jacobian_of = net(x[2]).softmax(0).detach(), torch.kron(torch.eye(2, dtype=F64), x[2])
    precision = jacobian_of.T @ (probs.diag() - probs.outer(probs)) @ jacobian_of + DELTA * torch.eye(6, dtype=F64)
    wanted = torch.linalg.inv(precision).diagonal().view(2, 3)
    torch.testing.assert_close(posterior.variance()["weight"], wanted)
