from __future__ import annotations

import pytest
import torch
from sklearn.metrics import mean_squared_error
from torch.distributions import Normal

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics.regression import GaussianNLL, RootMeanSquaredError, gaussian_nll


def predictions(*shape):
    generator = torch.Generator().manual_seed(0)
    mean, noise, target = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return mean, noise.square() + 0.1, target


@pytest.mark.parametrize("shape", [(50,), (20, 3)])
def test_nll_equals_the_log_density_of_torch(shape):
    mean, variance, target = predictions(*shape)
    torch.testing.assert_close(gaussian_nll(mean, variance, target), -Normal(mean, variance.sqrt()).log_prob(target))


def test_shells_are_means_over_all_points_of_uneven_batches():
    mean, variance, target = predictions(20, 3)
    nll, rmse = GaussianNLL(), RootMeanSquaredError()
    for part in (slice(0, 1), slice(1, 20)):
        nll.update(mean[part], variance[part], target[part])
        rmse.update(mean[part], variance[part], target[part])
    expected_nll = -Normal(mean, variance.sqrt()).log_prob(target).mean()
    assert nll.compute().item() == pytest.approx(expected_nll.item(), rel=1e-6)
    assert rmse.compute().item() == pytest.approx(mean_squared_error(target, mean) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan])
def test_a_variance_that_is_not_positive_is_refused(bad):
    mean, variance, target = predictions(4)
    variance[2] = bad
    with pytest.raises(HyperparameterError, match=rf"positive variances, but the smallest one is {bad:.4g}\. Add"):
        gaussian_nll(mean, variance, target)


@pytest.mark.parametrize("shell", [GaussianNLL, RootMeanSquaredError])
def test_shapes_that_would_broadcast_are_refused(shell):
    mean, variance, target = predictions(4)
    with pytest.raises(ShapeError, match=r"Mean \[4, 1\], variance \[4\] and targets \[4\].*squeeze"):
        shell().update(mean.unsqueeze(-1), variance, target)
