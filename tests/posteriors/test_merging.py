"""Merged posteriors against the posterior of all data, in conjugate models."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors import FullGaussian, MeanField, merge

F64 = torch.float64
DELTA = 0.7


def regression(x, y):
    """Full posterior under unit noise."""
    precision = x.T @ x + DELTA * torch.eye(x.shape[1], dtype=F64)
    mean = torch.linalg.solve(precision, x.T @ y)
    return FullGaussian({"a": mean[:2], "b": mean[2:, None]}, precision, {"a": DELTA, "b": DELTA}, len(y))


def means(x, centre):
    """Posterior of the mean of unit-noise data, weight by weight."""
    precision = torch.full((3,), len(x) + DELTA, dtype=F64)
    mean = (x.sum(0) + DELTA * centre) / precision
    return MeanField({"w": mean}, {"w": precision}, {"w": DELTA}, len(x), {}, {"w": centre})


def test_three_parts_of_a_regression_are_the_posterior_of_all(generator):
    x, y = torch.randn(30, 3, generator=generator, dtype=F64), torch.randn(30, generator=generator, dtype=F64)
    merged = merge([regression(x[:5], y[:5]), regression(x[5:20], y[5:20]), regression(x[20:], y[20:])])
    whole = regression(x, y)
    torch.testing.assert_close(merged.precision, whole.precision)
    torch.testing.assert_close(merged.mean, whole.mean)
    assert merged.num_data == 30


def test_a_prior_with_a_centre_is_counted_once(generator):
    x, centre = torch.randn(12, 3, generator=generator, dtype=F64), torch.tensor([1.0, -2.0, 3.0], dtype=F64)
    merged, whole = merge([means(x[:4], centre), means(x[4:], centre)]), means(x, centre)
    torch.testing.assert_close(merged.mean, whole.mean)
    torch.testing.assert_close(merged.precision, whole.precision)


def test_one_posterior_is_itself():
    q = means(torch.ones(4, 3, dtype=F64), torch.zeros(3, dtype=F64))
    torch.testing.assert_close(merge([q]).mean, q.mean)


def with_constants(num_data, running, count):
    ones = {"w": torch.ones(1)}
    return MeanField(ones, {"w": torch.full((1,), 5.0)}, {"w": 1.0}, num_data, {"mean": running, "count": count})


def test_statistics_are_averaged_by_the_number_of_examples():
    merged = merge(
        [
            with_constants(10, torch.tensor([0.0]), torch.tensor(3)),
            with_constants(30, torch.tensor([4.0]), torch.tensor(5)),
        ]
    )
    assert merged.constants["mean"].tolist() == [3.0]
    assert merged.constants["count"].item() == 3


def test_bad_input():
    zero = torch.zeros(3, dtype=F64)
    q = means(torch.ones(4, 3, dtype=F64), zero)
    with pytest.raises(PosteriorError, match="merge got no posterior"):
        merge([])
    with pytest.raises(PosteriorError, match="merge got FullGaussian, MeanField"):
        merge([q, regression(torch.ones(4, 3, dtype=F64), torch.ones(4, dtype=F64))])
    with pytest.raises(PosteriorError, match="weights of posterior 1, or their order, differ"):
        merge([q, MeanField({"v": zero}, {"v": zero + 1}, {"v": 1.0}, 1, {}, {"v": zero})])
    with pytest.raises(PosteriorError, match="prior of posterior 1 differs"):
        merge([q, means(torch.ones(4, 3, dtype=F64), zero + 1)])
    wide = MeanField({"w": zero}, {"w": zero + 0.1}, {"w": DELTA}, 1, {}, {"w": zero})
    with pytest.raises(PosteriorError, match=r"precision of w is not positive \(its smallest value is -0\.5\)"):
        merge([wide, wide])


def test_a_full_precision_in_another_order_of_weights_is_refused():
    """The rows of a full precision follow the order of the weights, so they cannot be added in another order."""
    zeros = {"a": torch.zeros(1), "b": torch.zeros(1)}
    q = FullGaussian(zeros, torch.diag(torch.tensor([2.0, 3.0])), {"a": 1.0, "b": 1.0}, num_data=1)
    swapped = FullGaussian(
        dict(reversed(zeros.items())), torch.diag(torch.tensor([3.0, 2.0])), {"a": 1.0, "b": 1.0}, num_data=1
    )
    with pytest.raises(PosteriorError, match="weights of posterior 1, or their order, differ"):
        merge([q, swapped])
