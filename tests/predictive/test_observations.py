"""Predictions with noise against mixtures of torch.distributions, closed forms, and scipy's distribution functions."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from scipy import stats
from torch.distributions import (
    Categorical,
    Distribution,
    Laplace,
    MixtureSameFamily,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
)

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.predictive import Quantiles, find_observation
from lightning_bayes.predictive.observations import log_densities, observed
from lightning_bayes.predictive.quantiles import distribution_function, mixture_quantile

S, B = 5, 7


def drawn(generator, kind):
    """Parameters ``[S · B]`` of a family."""
    a, b = torch.randn(S * B, generator=generator), 0.2 + torch.rand(S * B, generator=generator)
    families = {
        "normal": lambda: Normal(a, b),
        "laplace": lambda: Laplace(a, b),
        "student": lambda: StudentT(3 + b, a, b),
        "poisson": lambda: Poisson(5 * b),
        "negative binomial": lambda: NegativeBinomial(3 * b, logits=a),
    }
    return families[kind]()


@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "poisson", "negative binomial"])
def test_moments_obey_the_law_of_total_variance(kind, generator):
    family = drawn(generator, kind)
    prediction = observed(family, S)
    vars(family).pop("probs", None)  # computed from the logits
    names = [name for name in family.arg_constraints if name in vars(family)][:3]
    parts = {name: getattr(family, name).view(S, B).T for name in names}
    mixture = MixtureSameFamily(Categorical(torch.ones(B, S)), type(family)(**parts))
    torch.testing.assert_close(prediction.mean, mixture.mean)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, mixture.variance)


@pytest.mark.parametrize("kind", ["normal", "laplace", "student"])
def test_the_interval_holds_its_probability_exactly(kind, generator):
    family = drawn(generator, kind)
    low, high = (mixture_quantile(family, S, level) for level in (0.05, 0.95))
    mass = [distribution_function(family, y.repeat(S)).view(S, B).mean(0) for y in (low, high)]
    torch.testing.assert_close(mass[0], torch.full_like(mass[0], 0.05))
    torch.testing.assert_close(mass[1], torch.full_like(mass[1], 0.95))


def test_counts_get_the_smallest_number_that_reaches_the_level(generator):
    family = Poisson(10 * torch.rand(B, generator=generator))
    for level in (0.05, 0.5, 0.95):
        expected = torch.tensor(stats.poisson.ppf(level, family.rate.double().numpy()))
        torch.testing.assert_close(mixture_quantile(family, 1, level), expected)


@pytest.mark.parametrize("df", [0.7, 2.0, 5.0, 300.0])
def test_the_distribution_function_of_student_is_scipys(df):
    y = torch.linspace(-8, 8, 41, dtype=torch.float64)
    found = distribution_function(StudentT(torch.full_like(y, df)), y)
    torch.testing.assert_close(found, torch.tensor(stats.t.cdf(y.numpy(), df)))


def test_the_distribution_function_of_negative_binomials_is_scipys():
    y = torch.arange(-1.0, 20.0, dtype=torch.float64)
    family = NegativeBinomial(torch.full_like(y, 2.5), probs=torch.full_like(y, 0.4))
    torch.testing.assert_close(distribution_function(family, y), torch.tensor(stats.nbinom.cdf(y.numpy(), 2.5, 0.6)))


def test_a_mixture_of_mixtures_is_one_mixture(generator):
    loc = torch.randn(S * B, 2, generator=generator)
    inner = MixtureSameFamily(Categorical(torch.ones(S * B, 2)), Normal(loc, 0.5 * torch.ones_like(loc)))
    flat = loc.view(S, B, 2).permute(0, 2, 1).reshape(2 * S * B)
    both = Normal(flat, torch.full_like(flat, 0.5))
    torch.testing.assert_close(mixture_quantile(inner, S, 0.9), mixture_quantile(both, 2 * S, 0.9))


def test_densities_are_those_of_each_sample(generator):
    family, y = drawn(generator, "normal"), torch.randn(B, generator=generator)
    each = torch.stack(
        [Normal(m, s).log_prob(y) for m, s in zip(family.loc.view(S, B), family.scale.view(S, B), strict=True)]
    )
    torch.testing.assert_close(log_densities(family, S, y), each)


@pytest.mark.parametrize(
    ("name", "second"),
    [("mean_variance", lambda s: s**2), ("mean_log_variance", lambda s: 2 * s.log()), ("mean_std", lambda s: s)],
)
def test_the_named_forms_are_one_normal_distribution(name, second):
    mean, std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    link, observation = find_observation(name)
    assert link == "identity"
    for output in (torch.stack([mean, second(std)], 1), (mean, second(std))):
        found = observation(output)
        torch.testing.assert_close((found.mean, found.stddev), (mean, std))
    with pytest.raises(ShapeError, match=r"a tensor of an even number of columns, got \[4, 3\]"):
        observation(torch.zeros(4, 3))


def test_quantiles_of_a_uniform_distribution_have_its_moments():
    levels = torch.linspace(0.001, 0.999, 999)
    found = Quantiles(levels.tolist())(levels[None] * 6)
    torch.testing.assert_close(found.mean, torch.tensor([3.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.variance, torch.tensor([3.0]), rtol=1e-2, atol=0)
    torch.testing.assert_close(mixture_quantile(found, 1, 0.3).float(), torch.tensor([1.8]), rtol=1e-4, atol=0)


def test_what_is_no_level_is_refused():
    with pytest.raises(HyperparameterError, match="increasing numbers between 0 and 1"):
        Quantiles([0.9, 0.1])
    with pytest.raises(HyperparameterError, match="interval=90 must be a probability"):
        observed(Normal(torch.zeros(2), torch.ones(2)), 1, 90)


def test_unknown_distribution_functions_are_those_of_a_gaussian_with_the_same_moments():
    class Unknown(Distribution):
        arg_constraints: ClassVar = {}
        mean, stddev = torch.ones(2), 2 * torch.ones(2)

    found = distribution_function(Unknown(torch.Size([2]), validate_args=False), torch.zeros(2))
    torch.testing.assert_close(found, Normal(1.0, 2.0).cdf(torch.zeros(2)))
