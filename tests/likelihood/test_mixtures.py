"""Predictions with noise against mixtures of torch.distributions, closed forms, and scipy's distribution functions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributions as D
from scipy import stats
from torch.distributions import (
    Categorical,
    Laplace,
    MixtureSameFamily,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
)

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import Quantiles
from lightning_bayes.likelihood.distribution_functions import distribution_function
from lightning_bayes.likelihood.mixtures import mixture_quantile, moments, observed

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


def test_quantiles_of_a_uniform_distribution_have_its_moments():
    levels = torch.linspace(0.001, 0.999, 999)
    found = Quantiles(levels.tolist())(levels[None] * 6)
    torch.testing.assert_close(found.mean, torch.tensor([3.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.variance, torch.tensor([3.0]), rtol=1e-2, atol=0)
    torch.testing.assert_close(mixture_quantile(found, 1, 0.3).float(), torch.tensor([1.8]), rtol=1e-4, atol=0)


def test_what_is_no_probability_is_refused():
    with pytest.raises(HyperparameterError, match="interval=90 must be a probability"):
        observed(Normal(torch.zeros(2), torch.ones(2)), 1, 90)


# -- intervals inside the support ------------------------------------------------------------------------

SCIPY = {  # family of parameters a, b in (1, 2), and scipy's distribution
    "gamma": (lambda a, b: D.Gamma(a, b), lambda a, b: stats.gamma(a, scale=1 / b)),
    "beta": (lambda a, b: D.Beta(a, b), lambda a, b: stats.beta(a, b)),
    "lognormal": (lambda a, b: D.LogNormal(a, b), lambda a, b: stats.lognorm(b, scale=np.exp(a))),
    "lognormal of a wide law": (lambda a, b: D.LogNormal(a, 5 * b), lambda a, b: stats.lognorm(5 * b, scale=np.exp(a))),
    "weibull": (lambda a, b: D.Weibull(a, b), lambda a, b: stats.weibull_min(b, scale=a)),
    "pareto": (lambda a, b: D.Pareto(a, b), lambda a, b: stats.pareto(b, scale=a)),
    "pareto without a mean": (lambda a, b: D.Pareto(a, b / 3), lambda a, b: stats.pareto(b / 3, scale=a)),
    "exponential": (lambda a, b: D.Exponential(a), lambda a, b: stats.expon(scale=1 / a)),
    "chi2": (lambda a, b: D.Chi2(a), lambda a, b: stats.chi2(a)),
    "half-normal": (lambda a, b: D.HalfNormal(a), lambda a, b: stats.halfnorm(scale=a)),
    "half-cauchy": (lambda a, b: D.HalfCauchy(a), lambda a, b: stats.halfcauchy(scale=a)),
    "inverse gamma": (lambda a, b: D.InverseGamma(a, b), lambda a, b: stats.invgamma(a, scale=b)),
    "gumbel": (lambda a, b: D.Gumbel(a, b), lambda a, b: stats.gumbel_r(a, b)),
    "fisher": (lambda a, b: D.FisherSnedecor(3 * a, 5 * b), lambda a, b: stats.f(3 * a, 5 * b)),
    "uniform": (lambda a, b: D.Uniform(-a, b), lambda a, b: stats.uniform(-a, a + b)),
    "cauchy": (lambda a, b: D.Cauchy(a, b), lambda a, b: stats.cauchy(a, b)),
    "logit-normal": (
        lambda a, b: D.TransformedDistribution(D.Normal(a, b), [D.SigmoidTransform()]),
        lambda a, b: LogitNormal(a, b),
    ),
    "affine gamma": (
        lambda a, b: D.TransformedDistribution(D.Gamma(a, b), [D.AffineTransform(3.0, -2.0)]),
        lambda a, b: Mirrored(stats.gamma(a, scale=1 / b), 3.0, 2.0),
    ),
    "independent": (
        lambda a, b: D.Independent(D.Gamma(a[:, None].expand(-1, 2), b[:, None].expand(-1, 2)), 1),
        lambda a, b: stats.gamma(a[:, None].repeat(2, 1), scale=1 / b[:, None]),
    ),
    "multivariate normal": (
        lambda a, b: D.MultivariateNormal(torch.stack([a, b], 1), 4 * torch.eye(2)),
        lambda a, b: stats.norm(np.stack([a, b], 1), 2),
    ),
    "negative binomial": (lambda a, b: D.NegativeBinomial(3 * a, b / 3), lambda a, b: stats.nbinom(3 * a, 1 - b / 3)),
    "geometric": (lambda a, b: D.Geometric(a / 3), lambda a, b: stats.geom(a / 3, loc=-1)),
    "binomial": (lambda a, b: D.Binomial(10, b / 3), lambda a, b: stats.binom(10, b / 3)),
    "bernoulli": (lambda a, b: D.Bernoulli(a / 3), lambda a, b: stats.bernoulli(a / 3)),
}


class LogitNormal(NamedTuple):
    a: np.ndarray
    b: np.ndarray

    def ppf(self, level):
        return 1 / (1 + np.exp(-stats.norm(self.a, self.b).ppf(level)))


class Mirrored(NamedTuple):
    inner: Any
    loc: float
    scale: float

    def ppf(self, level):
        return self.loc - self.scale * self.inner.ppf(1 - level)


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("name", SCIPY)
def test_quantiles_are_scipys(name, validated, generator):
    a, b = 1 + torch.rand(2, B, generator=generator, dtype=torch.float64)
    build, truth = SCIPY[name]
    family = build(a, b)
    family._validate_args = validated
    for level in (0.05, 0.5, 0.95):
        expected = torch.tensor(truth(a.numpy(), b.numpy()).ppf(level), dtype=torch.float64)
        torch.testing.assert_close(mixture_quantile(family, 1, level), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["gamma", "beta", "lognormal", "binomial", "half-normal", "uniform"])
def test_mixtures_of_bounded_families_have_their_levels_inside_the_support(name, generator):
    a, b = 1 + torch.rand(2, S * B, generator=generator, dtype=torch.float64)
    build, truth = SCIPY[name]
    family, scipy = build(a, b), truth(a.numpy().reshape(S, B), b.numpy().reshape(S, B))
    for level in (0.001, 0.05, 0.95):
        found = mixture_quantile(family, S, level).numpy()
        lower, upper = scipy.support()
        assert (found >= lower.min(0) if hasattr(lower, "min") else found >= lower).all()
        assert (found <= upper.max(0) if hasattr(upper, "max") else found <= upper).all()
        assert (scipy.cdf(found).mean(0) >= level - 1e-6).all()
        assert (scipy.cdf(found - (1 if name == "binomial" else 1e-4)).mean(0) < level).all()


def test_families_without_a_distribution_function_have_the_quantiles_of_draws(generator):
    loc = torch.rand(S * B, generator=generator)
    family, state = D.VonMises(loc, 2 * torch.ones_like(loc)), torch.get_rng_state()
    for level in (0.05, 0.95):
        found = mixture_quantile(family, S, level)
        inside = np.stack([stats.vonmises(2, loc=each).cdf(found.numpy()) for each in loc.view(S, B).numpy()]).mean(0)
        assert np.abs(inside - level).max() < 5 * math.sqrt(level * (1 - level) / 4096)
    assert torch.equal(state, torch.get_rng_state())


def test_moments_that_torch_does_not_know_are_those_of_quantiles(generator):
    a = torch.rand(B, generator=generator, dtype=torch.float64)
    family = D.TransformedDistribution(D.Normal(a, 0.3 * torch.ones_like(a)), [D.ExpTransform()])
    mean, variance = moments(family)
    truth = stats.lognorm(0.3, scale=np.exp(a.numpy()))
    torch.testing.assert_close(mean, torch.tensor(truth.mean()), rtol=1e-3, atol=0)
    torch.testing.assert_close(variance, torch.tensor(truth.var()), rtol=2e-2, atol=0)


def test_a_parameter_that_is_nan_has_no_interval():
    prediction = observed(D.Gamma(torch.tensor([1.0, math.nan]), torch.ones(2), validate_args=False), 1)
    assert prediction.lower.isnan().tolist() == prediction.upper.isnan().tolist() == [False, True]
