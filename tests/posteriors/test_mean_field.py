"""The mean-field Gaussian against torch.distributions and the laws of its samples."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.posteriors import FullGaussian, MeanField, initial_curvature, marginals, precision

F64 = torch.float64


@pytest.mark.parametrize(
    ("precisions", "prior", "culprits"),
    [
        ({"a": torch.ones(2)}, {"a": 1.0, "b": 1.0}, "b"),
        ({"a": torch.ones(2), "b": torch.ones(4)}, {"a": 1.0, "b": 1.0}, "b"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, {"b": 1.0}, "a"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, {"a": 1.0, "b": 1.0}, "c"),
    ],
    ids=["no precision", "another shape", "no prior", "no mean"],
)
def test_parts_that_do_not_fit_are_named(precisions, prior, culprits):
    mean = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(PosteriorError, match=rf"^Mean, precision and prior do not match for {culprits}\.$"):
        MeanField(mean, precisions, prior, num_data=1)


def test_precision_by_hand():
    """(Ñ/τ)(s + γ) + δ with Ñ = 100, τ = 0.5, s = 0.3, γ = 0.1, δ = 4: 200 · 0.4 + 4 = 84; δ is not tempered."""
    found = precision(torch.tensor([0.3]), num_data=100, prior_precision=4.0, kl_weight=0.5, damping=0.1)
    torch.testing.assert_close(found, torch.tensor([84.0]))


@pytest.mark.parametrize("kl_weight", [0.05, 0.5, 1.0, 3.0])
def test_precision_minimises_the_tempered_bound(kl_weight):
    """For f(θ) = h θ²/2 the bound Ñ E_q[f] + τ KL(q ‖ p) is stationary and convex here, for every τ."""
    n, h, delta = 30, torch.tensor(0.7, dtype=F64), torch.tensor(2.0, dtype=F64)

    def bound(log_precision):
        p = log_precision.exp()
        zero = torch.zeros((), dtype=F64)
        return n * h / (2 * p) + kl_weight * kl_divergence(Normal(zero, p.rsqrt()), Normal(zero, delta.rsqrt()))

    found = precision(h, num_data=n, prior_precision=2.0, kl_weight=kl_weight).log()
    slope = torch.autograd.functional.jacobian(bound, found)
    assert abs(slope) < 1e-12
    assert torch.autograd.functional.hessian(bound, found) > 0


def test_initial_curvature_is_the_inverse_of_precision():
    given = {"num_data": 80.0, "prior_precision": 3.0, "kl_weight": 0.25, "damping": 0.01}
    curvature = initial_curvature(50.0, **given)
    torch.testing.assert_close(precision(torch.tensor(curvature), **given), torch.tensor(50.0))


def test_an_initial_precision_below_prior_and_damping_is_refused():
    message = r"init_precision=5 is below 7, .*prior_precision=3 and damping=0\.01.*Use at least that"
    with pytest.raises(HyperparameterError, match=message):
        initial_curvature(5.0, num_data=100, prior_precision=3.0, kl_weight=0.25, damping=0.01)


LEAST = [
    {"num_data": 100, "prior_precision": 0.12345678, "damping": 0.01},
    {"num_data": 50000, "prior_precision": 1 / 3, "damping": 1e-3},
    {"num_data": 1797, "prior_precision": 2.0, "kl_weight": 0.3, "damping": 1e-3},
]


@pytest.mark.parametrize("given", LEAST, ids=str)
def test_the_least_initial_precision_is_taken_as_computed_and_as_said(given):
    """Rounding errors of the sum are no negative curvature, and none that a bias correction would miss."""
    least = given["prior_precision"] + given["damping"] * given["num_data"] / given.get("kl_weight", 1.0)
    assert initial_curvature(least, **given) == 0
    with pytest.raises(HyperparameterError) as refused:
        initial_curvature(least * (1 - 1e-9), **given)
    said = re.fullmatch(r"init_precision=(\S+) is below (\S+), the precision of .*", str(refused.value)).groups()
    assert float(said[0]) < float(said[1])
    assert initial_curvature(float(said[1]), **given) == 0


def test_marginals_of_a_mean_field_posterior_are_its_part(generator):
    mean = {"a": torch.randn(3, 2, generator=generator, dtype=F64), "b": torch.randn(3, generator=generator, dtype=F64)}
    precisions = {name: 0.1 + 9 * torch.rand(m.shape, generator=generator, dtype=F64) for name, m in mean.items()}
    posterior = MeanField(mean, precisions, {"a": 2.0, "b": 0.5}, num_data=50)
    names = list(posterior.mean)
    part, rest = marginals(posterior, names[:1]), marginals(posterior, names[1:])
    assert list(part.mean) == names[:1]
    torch.testing.assert_close(part.precision[names[0]], posterior.precision[names[0]])
    assert (part.kl() + rest.kl()).item() == pytest.approx(posterior.kl().item(), rel=1e-5)


def test_marginals_of_a_correlated_posterior_are_each_weights_own(generator):
    root = torch.randn(6, 6, generator=generator, dtype=F64)
    mean = {"a": torch.randn(4, generator=generator, dtype=F64), "b": torch.zeros(2, dtype=F64)}
    q = FullGaussian(mean, root @ root.T + torch.eye(6), {"a": 1.0, "b": 1.0}, num_data=1)
    variances = torch.linalg.inv(q.precision).diagonal()
    each = marginals(q, ["a", "b"])
    torch.testing.assert_close(torch.cat(list(each.variance().values())), variances)
    assert each.kl() < q.kl()  # what the correlations say is missing
