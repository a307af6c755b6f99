"""Shaped noise against its own objective: torch.distributions has the KL, autograd the gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from lightning_bayes.posteriors import noise_shapes, prior_centre

F64 = torch.float64
SIZES = torch.tensor([1.0, 0.2], dtype=F64)
STATED = [{}, {"prior_precision": 3.0}, {"prior_precision": 3.0, "kl_weight": 0.5}]


@pytest.fixture
def curvatures(generator):
    """Two tensors over four decades."""
    return [torch.randn(40, generator=generator, dtype=F64).mul(2).exp(), torch.rand(30, generator=generator).to(F64)]


def covariances(curvatures, num_data=20, prior_precision=0.0, kl_weight=1.0):
    scale = num_data / kl_weight
    zeros, stated = [torch.zeros_like(s) for s in curvatures], [prior_precision / scale] * len(curvatures)
    shape = noise_shapes(curvatures, zeros, list(SIZES), relative_noise=0.3, scale=scale, stated=stated)
    return shape, [
        1 / (scale * (s.clamp_min(0) + damping)) for s, scale, damping in zip(curvatures, *shape, strict=True)
    ]


@pytest.mark.parametrize("numbers", STATED, ids=str)
def test_the_covariance_minimises_the_tempered_bound(curvatures, numbers, generator):
    """E_q[f̄] = ½ Σ_i s_i Σ_i for a quadratic loss; the KL's gradient at the mean is that of the stated prior."""
    shape, found = covariances(curvatures, **numbers)
    stated = numbers.get("prior_precision", 0.0) * numbers.get("kl_weight", 1.0) / 20  # δ̃
    for s, variance, scale, damping in zip(curvatures, found, *shape, strict=True):
        mean = torch.randn(s.shape, generator=generator, dtype=F64).requires_grad_()
        start = torch.randn(s.shape, generator=generator, dtype=F64)
        variance.requires_grad_()
        prior = Normal(prior_centre(mean, start, stated, damping), (scale * damping).rsqrt())
        objective = 0.5 * (s * variance).sum() + kl_divergence(Normal(mean, variance.sqrt()), prior).sum() / scale
        by_mean, by_variance = torch.autograd.grad(objective, [mean, variance])
        torch.testing.assert_close(by_variance * variance, torch.zeros_like(s), atol=1e-12, rtol=0)
        torch.testing.assert_close(by_mean, stated * (mean - start))


def test_the_mean_variance_is_that_of_the_noise_scale_until_the_data_allow_less(curvatures):
    for num_data in (1e-6, 1e-3):
        for variance, size in zip(covariances(curvatures, num_data=num_data)[1], SIZES, strict=True):
            torch.testing.assert_close(variance.mean().sqrt(), 0.3 * size, rtol=1e-2, atol=0)
    shape, found = covariances(curvatures, num_data=1e12)
    for s, variance, damping in zip(curvatures, found, shape.damping, strict=True):
        torch.testing.assert_close(variance, 1 / (1e12 * (s + damping)), rtol=1e-6, atol=0)


def test_more_data_never_widen_the_noise(curvatures):
    by_size = [covariances(curvatures, num_data=n)[1] for n in (1, 10, 1e2, 1e4, 1e8)]
    for fewer, more in itertools.pairwise(by_size):
        assert all((b < a).all() for a, b in zip(fewer, more, strict=True))


def test_the_unit_of_the_loss_does_not_matter_while_the_noise_scale_rules(curvatures):
    small, large = (covariances([c * s for s in curvatures], num_data=1e-20)[1] for c in (1.0, 1e4))
    for a, b in zip(small, large, strict=True):
        torch.testing.assert_close(a, b)


def test_no_variance_exceeds_34_times_the_mean():
    lonely = torch.zeros(100_000, dtype=F64)
    lonely[0] = 1.0
    alive = torch.ones(100_000, dtype=F64)
    alive[0] = 0.0
    for variance in covariances([lonely, alive])[1]:
        assert variance.max() <= (1.03 / 0.03) * variance.mean()


@pytest.mark.parametrize("value", [0.0, -2.0, 1e-30])
def test_without_curvature_the_noise_is_flat(value):
    both = [torch.full((count,), value, dtype=F64) for count in (3, 2)]
    for variance, size in zip(covariances(both)[1], SIZES, strict=True):
        torch.testing.assert_close(variance.sqrt(), (0.3 * size).expand_as(variance))


def test_negative_curvature_counts_as_none(curvatures):
    negative = [torch.where(s < s.median(), -s, s) for s in curvatures]
    clamped = [s.clamp_min(0) for s in negative]
    for a, b in zip(covariances(negative)[1], covariances(clamped)[1], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
