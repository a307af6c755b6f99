"""Every kind: density against torch.distributions, curvature against autograd, averages, draws, and states of files."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood import (
    Bernoulli,
    Categorical,
    Family,
    Gaussian,
    OutputLikelihood,
    Poisson,
    PredictedGaussian,
    Quantiles,
    Raw,
    find_kind,
)
from lightning_bayes.likelihood.predicted_gaussian import FORMS

F64 = torch.float64
S, B = 5, 4
POSITIVE = {"variance", "std"}

KINDS = {  # kind, shape of one output, distribution of targets given outputs [N, …]
    "classes": (Categorical(), (3,), lambda f: D.Categorical(logits=f)),
    "pixels": (Categorical(), (3, 2, 2), lambda f: D.Categorical(logits=f.movedim(1, -1))),
    "tokens": (Categorical(-1), (2, 3), lambda f: D.Categorical(logits=f)),
    "labels": (Bernoulli(), (3,), lambda f: D.Bernoulli(logits=f)),
    "values": (Gaussian(0.3), (3,), lambda f: D.Normal(f, 0.3)),
    "values of two units": (Gaussian([0.3, 2.0]), (2,), lambda f: D.Normal(f, torch.tensor([0.3, 2.0], dtype=F64))),
    "counts": (Poisson(), (2,), lambda f: D.Poisson(f.exp())),
    "rates": (Poisson(is_log=False), (2,), lambda f: D.Poisson(f)),
    **{
        form: (
            PredictedGaussian(form),
            (4,),
            lambda f, form=form: D.Normal(f[:, :2], FORMS[form].read(f[:, 2:]).sqrt()),
        )
        for form in FORMS
    },
    "one predicted value": (
        PredictedGaussian("log_variance"),
        (2,),
        lambda f: D.Normal(f[:, 0], (f[:, 1] / 2).exp()),
    ),
    "gamma": (Family(lambda f: D.Gamma(f.exp(), 2.0)), (), lambda f: D.Gamma(f.exp(), 2.0)),
}
WITH_ROOT = [name for name in KINDS if name != "gamma"]


def drawn(name, generator, *leading):
    _, shape, _ = KINDS[name]
    outputs = torch.randn(*leading, *shape, generator=generator, dtype=F64)
    return outputs.abs() + 0.3 if name in POSITIVE | {"rates"} else outputs


@pytest.fixture
def targets(generator):
    def of(distribution):
        torch.manual_seed(1)
        return distribution.sample()

    with torch.random.fork_rng():
        yield of


@pytest.mark.parametrize("name", KINDS)
def test_densities_are_those_of_torch_distributions(name, generator, targets):
    kind, _, family = KINDS[name]
    outputs = drawn(name, generator, B)
    y = targets(family(outputs))
    torch.testing.assert_close(kind.log_prob(outputs, y), family(outputs).log_prob(y))
    flat = y.reshape(B, -1).squeeze(1)
    assert kind.target_shape(outputs, flat) == y.shape
    torch.testing.assert_close(kind.nll(outputs, y), -family(outputs).log_prob(y).reshape(B, -1).sum(1))


@pytest.mark.parametrize("name", WITH_ROOT)
def test_the_root_is_that_of_the_expected_hessian(name, generator):
    """Over many targets drawn from torch's family, the mean of ∇ log p ∇ log pᵀ is H, within its standard error."""
    kind, shape, family = KINDS[name]
    outputs, count = drawn(name, generator, 1), 40_000
    columns = torch.stack([kind.root(outputs, index).flatten() for index in range(math.prod(shape))])
    found = columns.mT @ columns
    with torch.random.fork_rng():
        torch.manual_seed(0)
        repeated = outputs.repeat(count, *[1] * len(shape)).requires_grad_()
        score = family(repeated).log_prob(family(repeated).sample()).sum()
        (g,) = torch.autograd.grad(score, repeated)
    products = torch.einsum("np,nq->npq", g.flatten(1), g.flatten(1))
    z = (products.mean(0) - found) / (products.std(0) / math.sqrt(count) + 1e-9)
    assert float(z.abs().max()) < 5


@pytest.mark.parametrize("name", ["classes", "pixels", "tokens", "labels", "values", "values of two units", "counts"])
def test_where_the_hessian_does_not_depend_on_the_target_the_root_is_exact(name, generator, targets):
    kind, shape, family = KINDS[name]
    outputs = drawn(name, generator, 1)
    y = targets(family(outputs))
    size = math.prod(shape)
    columns = torch.stack([kind.root(outputs, index).flatten() for index in range(size)])
    hessian = torch.autograd.functional.hessian(lambda f: kind.nll(f, y).sum(), outputs).reshape(size, size)
    torch.testing.assert_close(columns.mT @ columns, hessian)


@pytest.mark.parametrize("name", KINDS)
def test_draws_have_the_moments_of_the_family(name, generator):
    kind, shape, family = KINDS[name]
    outputs, count = drawn(name, generator, 1), 20_000
    draws = kind.sample(outputs.repeat(count, *[1] * len(shape)), generator).double()
    again = kind.sample(outputs.repeat(3, *[1] * len(shape)), torch.Generator().manual_seed(3))
    assert torch.equal(again, kind.sample(outputs.repeat(3, *[1] * len(shape)), torch.Generator().manual_seed(3)))
    if isinstance(family(outputs), D.Categorical):
        probs = family(outputs).probs[0]
        draws = F.one_hot(draws.long(), probs.shape[-1]).double()
        mean, variance = probs, probs * (1 - probs)
    else:
        mean, variance = family(outputs).mean[0], family(outputs).variance[0]
    assert float(((draws.mean(0) - mean) / (variance / count).sqrt()).abs().max()) < 4.5


@pytest.mark.parametrize("name", KINDS)
def test_a_summary_has_the_moments_of_the_mixture(name, generator):
    kind, _, family = KINDS[name]
    outputs = drawn(name, generator, S, B)
    found, each = kind.summarise(outputs), [family(one) for one in outputs]
    if hasattr(found, "probs"):
        probs = torch.stack([one.probs for one in each]).mean(0)
        dim = getattr(kind, "classes", -1)
        torch.testing.assert_close(found.probs, probs.movedim(-1, dim) if isinstance(kind, Categorical) else probs)
        mixed = D.Categorical(probs) if isinstance(kind, Categorical) else D.Bernoulli(probs)
        torch.testing.assert_close(found.entropy, mixed.entropy())
        within = torch.stack([one.entropy() for one in each]).mean(0)
        torch.testing.assert_close(found.mutual_information, mixed.entropy() - within)
    else:
        means, variances = (torch.stack([getattr(one, name) for one in each]) for name in ("mean", "variance"))
        torch.testing.assert_close(found.mean, means.mean(0))
        torch.testing.assert_close(found.aleatoric, variances.mean(0))
        torch.testing.assert_close(found.epistemic, means.var(0, correction=0))
        assert (found.lower <= found.upper).all()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "gamma"])
def test_the_combined_output_states_the_mean_of_the_mixture(name, generator):
    kind, _, family = KINDS[name]
    outputs = drawn(name, generator, S, B)
    combined, summary = family(kind.combine(outputs)), kind.summarise(outputs)
    if hasattr(summary, "probs"):
        probs = summary.probs.movedim(kind.classes, -1) if isinstance(kind, Categorical) else summary.probs
        torch.testing.assert_close(combined.probs, probs)
    else:
        torch.testing.assert_close(combined.mean, summary.mean)
    if isinstance(kind, PredictedGaussian):
        torch.testing.assert_close(combined.variance, summary.aleatoric + summary.epistemic)
    one, of_itself = family(kind.combine(outputs[:1])), family(outputs[0])
    name = "probs" if hasattr(summary, "probs") else "mean"
    torch.testing.assert_close(getattr(one, name), getattr(of_itself, name))


def test_outputs_may_be_probabilities_themselves(generator):
    probs = torch.rand(S, B, 3, generator=generator, dtype=F64)
    normalised = probs / probs.sum(-1, keepdim=True)
    for kind, values in ((Bernoulli(is_logits=False), probs), (Categorical(is_logits=False), normalised)):
        torch.testing.assert_close(kind.combine(values), values.mean(0))
        torch.testing.assert_close(kind.summarise(values).probs, values.mean(0))
        assert not kind.has_temperature
    y = torch.randint(2, (B, 3), generator=generator)
    torch.testing.assert_close(
        Bernoulli(is_logits=False).log_prob(probs[0], y), D.Bernoulli(probs[0]).log_prob(y.double())
    )
    torch.testing.assert_close(
        Categorical(is_logits=False).log_prob(normalised[0], y[:, 0]), normalised[0].gather(1, y[:, :1])[:, 0].log()
    )


@pytest.mark.parametrize(
    ("form", "pair"),
    [(form, pair) for form in ("variance", "log_variance", "std", "log_std") for pair in (tuple, list)],
)
def test_mean_and_variance_may_be_two_outputs(form, pair, generator):
    both = torch.rand(S, B, 4, generator=generator, dtype=F64) + 0.1
    kind, two = PredictedGaussian(form), pair(both.chunk(2, -1))
    y = torch.randn(B, 2, generator=generator, dtype=F64)
    one_each = pair(leaf[0] for leaf in two)
    torch.testing.assert_close(kind.log_prob(one_each, y), kind.log_prob(both[0], y))
    combined = kind.combine(two)
    assert type(combined) is pair
    torch.testing.assert_close(torch.cat(list(combined), -1), kind.combine(both))
    torch.testing.assert_close(tuple(kind.summarise(two)), tuple(kind.summarise(both)))


def test_quantiles_are_averaged_as_those_of_the_mixture(generator):
    levels = (0.1, 0.3, 0.5, 0.7, 0.9)
    outputs = torch.randn(S, B, 5, generator=generator, dtype=F64).sort(-1).values
    kind = Quantiles(levels)
    combined = kind.combine(outputs)
    for column, level in enumerate(levels):
        below = torch.stack([kind(one).cdf(combined[:, column] + 1e-9) for one in outputs]).mean(0)
        assert (below >= level - 1e-6).all()
        above = torch.stack([kind(one).cdf(combined[:, column] - 1e-6) for one in outputs]).mean(0)
        assert (above < level).all()
    torch.testing.assert_close(kind.combine(outputs[:1]), outputs[0], rtol=1e-6, atol=1e-6)


def test_a_function_that_states_mean_and_variance_is_averaged_as_its_mixture(generator):
    outputs = torch.randn(S, B, 2, generator=generator, dtype=F64)
    kind = Family(lambda f: D.Normal(f[:, 0], F.softplus(f[:, 1])))
    torch.testing.assert_close(kind.combine(outputs), PredictedGaussian("softplus_std").combine(outputs))
    other = Family(lambda f: D.Normal(f[:, 0], F.softplus(f[:, 1]) + 1))
    torch.testing.assert_close(other.combine(outputs), outputs.mean(0))


# -- weights of the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, (0.5, 2.0, 7.0)])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dim", [1, -1])
def test_weights_of_classes_are_those_of_the_losss_hessian(smoothing, weight, soft, dim, generator):
    outputs = torch.randn(2, 3, 3, generator=generator, dtype=F64)
    y = torch.rand(2, 3, 3, generator=generator, dtype=F64) if soft else torch.randint(3, (2, 3), generator=generator)
    kind = Categorical(dim, weight, smoothing)

    def loss(f):
        given = y.movedim(dim, 1) if soft else y
        tensor = None if weight is None else torch.tensor(weight, dtype=F64)
        return F.cross_entropy(f.movedim(dim, 1), given, tensor, reduction="sum", label_smoothing=smoothing)

    hessian = torch.autograd.functional.hessian(loss, outputs).reshape(18, 18)
    factor = kind.weights(outputs, y)
    factor = torch.ones(2, 3, dtype=F64) if factor is None else factor
    scale = factor.sqrt().unsqueeze(dim).expand_as(outputs)
    blocks = []
    for row in range(2):
        columns = torch.stack([(scale * kind.root(outputs, index))[row].flatten() for index in range(9)])
        blocks.append(columns.mT @ columns)
    torch.testing.assert_close(torch.block_diag(*blocks), hessian)


@pytest.mark.parametrize("weight", [5.0, [1.0, 3.0]])
def test_pos_weight_is_that_of_the_losss_hessian(weight, generator):
    outputs = torch.randn(1, 2, generator=generator, dtype=F64)
    y, kind = torch.tensor([[1.0, 0.3]], dtype=F64), Bernoulli(weight)

    def loss(f):
        return F.binary_cross_entropy_with_logits(f, y, pos_weight=torch.tensor(weight, dtype=F64), reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, outputs).reshape(2, 2)
    columns = torch.stack([(kind.weights(outputs, y).sqrt() * kind.root(outputs, index))[0] for index in range(2)])
    torch.testing.assert_close(columns.mT @ columns, hessian)


# -- names, states, completion ---------------------------------------------------------------------------

STATED = [
    Categorical(),
    Categorical(-1, (1, 2, 3.5), 0.1),
    Categorical(is_logits=False),
    Bernoulli(),
    Bernoulli([1.0, 2.0]),
    Gaussian(),
    Gaussian(0.5),
    Gaussian([0.5, 2.0]),
    Poisson(),
    Poisson(is_log=False),
    PredictedGaussian("log_std"),
    Quantiles((0.1, 0.9)),
    Raw("l1_loss"),
]


@pytest.mark.parametrize("kind", STATED, ids=repr)
def test_a_kind_is_restored_from_plain_data(kind, tmp_path):
    state = kind.state()
    assert json.loads(json.dumps(state)) == state
    torch.save(state, tmp_path / "state.pt")
    found = OutputLikelihood.of_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (type(found), found.state()) == (type(kind), state)
    assert kind.completed(kind).state() == state
    assert kind.completed(Raw()).state() == state


def test_a_file_holds_the_name_of_a_function_alone():
    def rate(outputs):
        return D.Exponential(outputs)

    found = OutputLikelihood.of_state(Family(rate).state())
    assert isinstance(found, Raw)
    assert "function test_a_file_holds_the_name_of_a_function_alone.<locals>.rate" in found.why


@pytest.mark.parametrize(
    ("stated", "recorded", "expected"),
    [
        (Categorical(), Categorical(-1, (1, 2), 0.1), Categorical(-1, (1, 2), 0.1)),
        (Categorical(-1), Categorical(), Categorical(-1)),
        (Bernoulli(), Bernoulli(3.0), Bernoulli(3.0)),
        (Gaussian(), Gaussian(0.5), Gaussian(0.5)),
        (Gaussian(0.5), Gaussian(), Gaussian(0.5)),
        (Poisson(), Poisson(is_log=False), Poisson(is_log=False)),
        (Quantiles((0.1, 0.9)), Raw(), Quantiles((0.1, 0.9))),
    ],
)
def test_a_stated_kind_is_completed_by_the_loss(stated, recorded, expected):
    assert stated.completed(recorded).state() == expected.state()


@pytest.mark.parametrize(
    ("stated", "recorded"),
    [
        (Categorical(1), Categorical(-1)),
        (Categorical(weight=(1, 2)), Categorical(weight=(2, 1))),
        (Bernoulli(), Categorical()),
        (Gaussian(0.5), Gaussian(0.6)),
        (Poisson(), Gaussian()),
        (PredictedGaussian(), PredictedGaussian("std")),
    ],
)
def test_a_contradiction_shows_both(stated, recorded):
    with pytest.raises(HyperparameterError) as error:
        stated.completed(recorded)
    assert repr(stated) in str(error.value)
    assert repr(recorded) in str(error.value)


def test_a_kind_shows_what_differs_from_its_defaults():
    assert repr(Categorical(-1)) == "Categorical(dim=-1)"
    assert repr(Gaussian()) == "Gaussian()"
    assert repr(Bernoulli([1.0, 2.0])) == "Bernoulli(pos_weight=[1.0, 2.0])"


def test_a_function_states_the_whole_distribution():
    kind = Family(lambda f: D.StudentT(4.0, f))
    assert kind.completed(Gaussian()) is kind


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("classification", "softmax", "categorical", "multiclass"), Categorical()),
        (("softmax_last",), Categorical(-1)),
        (("binary", "multilabel", "sigmoid", "bernoulli"), Bernoulli()),
        (("regression", "identity", "gaussian", "normal"), Gaussian()),
        (("counts", "exp", "poisson"), Poisson()),
        (("mean_variance",), PredictedGaussian("variance")),
        (("mean_log_variance",), PredictedGaussian("log_variance")),
        (("mean_std",), PredictedGaussian("std")),
        (("mean_log_std",), PredictedGaussian("log_std")),
    ],
)
def test_words_name_kinds(names, expected):
    for name in names:
        assert find_kind(name).state() == expected.state()
    assert find_kind(expected) is expected


def test_a_kind_of_the_user_needs_its_density_alone(generator):
    class Own(OutputLikelihood):
        def log_prob(self, outputs, targets):
            return -(outputs - targets).abs()

    assert Own().state()["why"] == "the file was written with Own, which it does not hold"
    outputs = torch.randn(S, B, generator=generator)
    torch.testing.assert_close(Own().combine(outputs), outputs.mean(0))
    torch.testing.assert_close(Own().summarise(outputs).variance, outputs.var(0, correction=0))
    with pytest.raises(HyperparameterError, match=r"Own does not define its curvature\. .*curvature='fisher'"):
        Own().root(outputs[0], 0)
    with pytest.raises(HyperparameterError, match="Own cannot draw targets"):
        Own().sample(outputs[0], generator)


# -- bad input -------------------------------------------------------------------------------------------


def test_what_is_out_of_range_is_refused():
    for wrong in (
        lambda: Categorical(0),
        lambda: Categorical(label_smoothing=1.0),
        lambda: Categorical(weight=(-1, 1)),
    ):
        with pytest.raises(HyperparameterError, match="dim=0 holds the examples"):
            wrong()
    for std in (0.0, -1.0, math.inf, math.nan, [1.0, 0.0]):
        with pytest.raises(HyperparameterError, match="must be a positive, finite standard deviation"):
            Gaussian(std)
    with pytest.raises(HyperparameterError, match="form='precision' is unknown; use 'variance', 'log_variance'"):
        PredictedGaussian("precision")
    with pytest.raises(HyperparameterError, match="increasing numbers between 0 and 1"):
        Quantiles([0.9, 0.1])
    with pytest.raises(HyperparameterError, match=r"not known: l1_loss\. Pass link='classification'"):
        Raw("l1_loss").log_prob(torch.zeros(2), torch.zeros(2))
    with pytest.raises(HyperparameterError, match=r"does not know its noise\. Pass Gaussian\(std\)"):
        Gaussian().log_prob(torch.zeros(2), torch.zeros(2))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"a tensor of an even number of columns, got \[4, 3\]"):
        PredictedGaussian().log_prob(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ShapeError, match=r"2 quantiles need as many columns of one tensor, got \[4, 3\]"):
        Quantiles((0.1, 0.9))(torch.zeros(4, 3))
    with pytest.raises(ShapeError, match=r"Gamma of the outputs has shape \[4\], but targets have \[3\]"):
        Family(lambda f: D.Gamma(f, f)).log_prob(torch.ones(4), torch.ones(3))
    with pytest.raises(ShapeError, match=r"Poisson got log-rates \[4, 1\] and counts \[4\]"):
        Poisson().log_prob(torch.zeros(4, 1), torch.zeros(4))
    for shape in ((6, 5), (6, 5, 1)):
        with pytest.raises(ShapeError, match=r"at least two classes, got \[6, 5.*link='binary'; for values, link='reg"):
            Categorical().summarise(torch.zeros(shape))
