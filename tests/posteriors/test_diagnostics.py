"""Diagnostics of posteriors against closed forms and sampling."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_bayes.posteriors import FullGaussian, MeanField, diagnostics


def mean_field(generator, **shapes):
    mean = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    precision = {name: 0.5 + torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return MeanField(mean, precision, dict.fromkeys(shapes, 2.0), num_data=10)


def test_noise_to_weight_is_that_of_samples(generator):
    q = mean_field(generator, a=(30, 2), b=(7,))
    draws = [q.sample(generator) for _ in range(4000)]
    noise = sum((draw[name] - q.mean[name]).square().sum() for draw in draws for name in q.mean) / len(draws)
    weights = sum(mean.square().sum() for mean in q.mean.values())
    expected = math.sqrt(noise / weights)
    relative_error = 1 / math.sqrt(2 * 67 * len(draws))  # of the root of a mean square
    assert abs(diagnostics.noise_to_weight(q) / expected - 1) < 4 * relative_error * 2  # precisions differ by 3


def test_weights_that_are_all_zero_have_infinite_noise():
    q = MeanField({"w": torch.zeros(3)}, {"w": torch.ones(3)}, {"w": 1.0}, 1)
    assert diagnostics.noise_to_weight(q) == math.inf


def test_data_share_counts_well_determined_parameters_of_a_linear_model(generator):
    """MacKay's γ = Σ λ/(λ+δ) with λ the eigenvalues of the data's Hessian, here orthogonal features."""
    eigenvalues, delta = 10 * torch.rand(6, generator=generator, dtype=torch.float64), 2.0
    q = MeanField({"w": torch.zeros(6)}, {"w": eigenvalues + delta}, {"w": delta}, 1)
    hessian = torch.diag(eigenvalues)
    effective = torch.trace(hessian @ torch.linalg.inv(hessian + delta * torch.eye(6)))
    shares = diagnostics.data_shares(q, {"w": torch.full((6,), delta, dtype=torch.float64)})
    assert shares["w"].sum() == pytest.approx(effective)
    assert diagnostics.average(shares) == pytest.approx(effective / 6)


def test_a_posterior_that_is_the_prior_has_no_share_and_no_divergence():
    q = MeanField({"w": torch.zeros(5)}, {"w": torch.full((5,), 2.0)}, {"w": 2.0}, 1)
    assert diagnostics.average(diagnostics.data_shares(q, {"w": torch.full((5,), 2.0)})) == 0
    assert q.kl().item() == pytest.approx(0, abs=1e-6)


def test_step_to_noise_of_steps_as_large_as_the_noise_is_one(generator):
    q = mean_field(generator, a=(4, 5), b=(2,))
    assert diagnostics.step_to_noise(q.std, q) == pytest.approx(1)
    assert diagnostics.step_to_noise({name: 3 * std for name, std in q.std.items()}, q) == pytest.approx(3)


def test_quantiles_of_the_precision_are_those_of_all_weights(generator):
    q = mean_field(generator, a=(40, 5), b=(11,))
    joined = torch.cat([q.precision["a"].flatten(), q.precision["b"]])
    expected = torch.quantile(joined, torch.tensor([0.05, 0.5, 0.95])).tolist()
    assert diagnostics.precision_quantiles(q) == pytest.approx(expected, rel=1e-5)


def test_quantiles_of_many_weights_are_those_of_some(generator):
    count = 3 * diagnostics.LARGEST_SAMPLE
    q = MeanField({"w": torch.zeros(count)}, {"w": 1 + torch.rand(count, generator=generator)}, {"w": 1.0}, 1)
    found = diagnostics.precision_quantiles(q, [0.25, 0.75])
    error = math.sqrt(0.25 * 0.75 / diagnostics.LARGEST_SAMPLE)  # of a quantile of uniform numbers
    assert found == pytest.approx([1.25, 1.75], abs=4 * error)


def test_layers_are_the_modules_that_hold_the_parameters():
    names = ["a.weight", "a.bias", "b.c.weight", "scale"]
    assert diagnostics.layers_of(names) == {
        "a": ["a.weight", "a.bias"],
        "b.c": ["b.c.weight"],
        "scale": ["scale"],
    }


def test_marginals_of_a_mean_field_posterior_are_its_part(generator):
    q = mean_field(generator, a=(4, 5), b=(2,))
    part = diagnostics.marginals(q, ["a"])
    assert list(part.mean) == ["a"]
    torch.testing.assert_close(part.precision["a"], q.precision["a"])
    rest = diagnostics.marginals(q, ["b"])
    assert (part.kl() + rest.kl()).item() == pytest.approx(q.kl().item(), rel=1e-5)


def test_marginals_of_a_correlated_posterior_are_each_weights_own(generator):
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    mean = {"a": torch.randn(4, generator=generator, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    q = FullGaussian(mean, root @ root.T + torch.eye(6), {"a": 1.0, "b": 1.0}, num_data=1)
    variances = torch.linalg.inv(q.precision).diagonal()
    each = diagnostics.marginals(q, ["a", "b"])
    torch.testing.assert_close(torch.cat(list(each.variance().values())), variances)
    assert each.kl() < q.kl()  # what the correlations say is missing
