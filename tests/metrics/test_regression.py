from __future__ import annotations

import pytest
import torch
from sklearn.metrics import mean_squared_error
from torch.distributions import Categorical, MixtureSameFamily, Normal

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics.regression import MixtureNLL, RootMeanSquaredError, mixture_nll


def predictions(*shape):
    generator = torch.Generator().manual_seed(0)
    mean, noise, target = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return mean, noise.square() + 0.1, target


def test_the_error_is_a_mean_over_all_target_values_of_uneven_batches():
    mean, variance, target = predictions(20, 3)
    rmse = RootMeanSquaredError()
    for part in (slice(0, 1), slice(1, 20)):
        rmse.update(mean[part], variance[part], target[part])
    assert rmse.compute().item() == pytest.approx(mean_squared_error(target, mean) ** 0.5, rel=1e-6)


def test_shapes_that_would_broadcast_are_refused():
    mean, variance, target = predictions(4)
    with pytest.raises(ShapeError, match=r"Mean \[4, 1\], variance \[4\] and targets \[4\].*squeeze"):
        RootMeanSquaredError().update(mean.unsqueeze(-1), variance, target)


def test_the_nll_of_a_mixture_equals_torchs_mixture_distribution():
    means, noise, _ = predictions(7, 20)  # seven samples of twenty points
    target = torch.linspace(-2, 2, 20, dtype=torch.float64)
    mixture = MixtureSameFamily(Categorical(torch.ones(20, 7)), Normal(means.T, noise.T.sqrt()))
    log_densities = Normal(means, noise.sqrt()).log_prob(target)
    torch.testing.assert_close(mixture_nll(log_densities), -mixture.log_prob(target))
    metric = MixtureNLL()
    for part in (slice(0, 3), slice(3, 20)):
        metric.update(log_densities[:, part])
    assert metric.compute().item() == pytest.approx(-mixture.log_prob(target).mean().item(), rel=1e-6)


def test_a_mixture_of_very_small_densities_stays_finite():
    torch.testing.assert_close(mixture_nll(torch.tensor([[-1000.0], [-1000.0]])), torch.tensor([1000.0]))


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_a_mixture_without_samples_is_refused(shape):
    with pytest.raises(ShapeError, match=r"log_densities has shape \[.*expected \[samples, \.\.\.\] with at least one"):
        mixture_nll(torch.zeros(shape))
