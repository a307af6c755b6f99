"""Leave-one-out against retraining without each example, and output covariances against Jacobians."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from lightning_bayes.curvature import Bernoulli, Gaussian
from lightning_bayes.errors import DataError, HyperparameterError
from lightning_bayes.posteriors import FullGaussian, MeanField
from lightning_bayes.predictive import leave_one_out, output_covariance, sensitivity

F64 = torch.float64
PRIOR = 0.5


def conjugate(x, y, std):
    """Posterior of a linear regression without bias."""
    precision = x.T @ x / std**2 + PRIOR * torch.eye(x.shape[1], dtype=F64)
    mean = torch.linalg.solve(precision, x.T @ y / std**2)
    return FullGaussian({"weight": mean[None]}, precision, {"weight": PRIOR}, len(y))


def logistic(x, y):
    """MAP by Newton's method, and the Laplace posterior there."""
    w = torch.zeros(x.shape[1], dtype=F64)
    for _ in range(30):
        p = (x @ w).sigmoid()
        precision = (x * (p * (1 - p))[:, None]).T @ x + PRIOR * torch.eye(x.shape[1], dtype=F64)
        w = w - torch.linalg.solve(precision, x.T @ (p - y) + PRIOR * w)
    return w, precision


@pytest.fixture
def rows(generator):
    x = torch.randn(60, 4, generator=generator, dtype=F64)
    truth = torch.tensor([1.5, -1.0, 0.5, 0.0], dtype=F64)
    return x, torch.bernoulli((x @ truth).sigmoid(), generator=generator)


def without(values, i):
    return torch.cat([values[:i], values[i + 1 :]])


def test_leave_one_out_is_exact_for_linear_regression(generator):
    x, std = torch.randn(12, 3, generator=generator, dtype=F64), 0.7
    y = x.sum(1) + std * torch.randn(12, generator=generator, dtype=F64)
    model = nn.Linear(3, 1, bias=False).double()
    found = leave_one_out(
        model, conjugate(x, y, std), [(x[:5], y[:5, None]), (x[5:], y[5:, None])], Gaussian(std), corrected=True
    )
    again = [conjugate(without(x, i), without(y, i), std).mean["weight"][0] @ x[i] for i in range(12)]
    torch.testing.assert_close(found.outputs[:, 0], torch.stack(again))
    torch.testing.assert_close(found.nll, -torch.distributions.Normal(torch.stack(again), std).log_prob(y))


@pytest.mark.parametrize(("corrected", "errors"), [(True, 0.2), (False, 2)])
def test_leave_one_out_of_logistic_regression_is_within_two_standard_errors_of_retraining(rows, corrected, errors):
    """Two standard errors of the mean over 60 rows; with the correction, a fifth of one."""
    x, y = rows
    w, precision = logistic(x, y)
    q = FullGaussian({"weight": w[None]}, precision, {"weight": PRIOR}, 60)
    model = nn.Linear(4, 1, bias=False).double()
    found = leave_one_out(model, q, [(x, y[:, None])], Bernoulli(), corrected=corrected).nll
    logits = torch.stack([logistic(without(x, i), without(y, i))[0] @ x[i] for i in range(60)])
    true = nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
    standard_error = float(true.std() / math.sqrt(60))
    assert abs(float(found.mean() - true.mean())) < errors * standard_error
    seen = nn.functional.binary_cross_entropy_with_logits(x @ w, y)
    assert abs(float(found.mean() - true.mean())) < abs(float(seen - true.mean()))  # better than the training loss
    assert torch.corrcoef(torch.stack([found, true]))[0, 1] > 0.99


def test_two_softmax_logits_match_one_sigmoid_logit(rows):
    """Softmax of [0, f] is the sigmoid of f: the same leave-one-out NLL through 2 × 2 covariances."""
    x, y = rows
    w, precision = logistic(x, y)
    one = FullGaussian({"weight": w[None]}, precision, {"weight": PRIOR}, 60)
    expected = leave_one_out(nn.Linear(4, 1, bias=False).double(), one, [(x, y[:, None])], Bernoulli(), corrected=True)

    class TwoLogits(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 1, bias=False)

        def forward(self, inputs):
            f = self.one(inputs)
            return torch.cat([torch.zeros_like(f), f], 1)

    two = FullGaussian({"one.weight": w[None]}, precision, {"one.weight": PRIOR}, 60)
    found = leave_one_out(TwoLogits().double(), two, [(x, y.long())], corrected=True)
    torch.testing.assert_close(found.nll, expected.nll)
    torch.testing.assert_close(found.change[:, 1], expected.change[:, 0])


@pytest.fixture
def net(generator):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def mean_field(model):
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    return MeanField(mean, {n: 30 + 90 * v.abs() for n, v in mean.items()}, dict.fromkeys(mean, 1.0), 10)


def test_output_covariance_matches_explicit_jacobians(net, generator):
    x, q = torch.randn(5, 3, generator=generator, dtype=F64), mean_field(net)
    jacobians = jacrev(lambda weights: functional_call(net, weights, (x,)))(q.mean)
    joint = torch.cat([jacobians[name].flatten(2) for name in q.mean], 2)
    variance = torch.cat([p.flatten() for p in q.precision.values()]).reciprocal()
    outputs, covariance = output_covariance(net, q, lambda: net(x))
    torch.testing.assert_close(outputs, net(x))
    torch.testing.assert_close(covariance, torch.einsum("bcp,p,bdp->bcd", joint, variance, joint))


def test_sensitivity_is_residual_times_variance(net, generator):
    x, q = torch.randn(5, 3, generator=generator, dtype=F64), mean_field(net)
    y = torch.tensor([0, 1, 2, 0, 1])
    outputs, covariance = output_covariance(net, q, lambda: net(x))
    residual = outputs.softmax(1) - nn.functional.one_hot(y, 3)
    expected = (covariance @ residual[..., None])[..., 0].norm(dim=1)
    torch.testing.assert_close(sensitivity(net, q, [(x, y)]), expected)
    drawn = sensitivity(net, q, [(x, y)], samples=4000)
    assert ((drawn / expected - 1).abs() < 0.15).all()  # ≈ 4 √(2/4000)


def test_a_posterior_wider_than_one_that_saw_the_example_is_not_corrected(net, generator):
    x, y = torch.randn(5, 3, generator=generator, dtype=F64), torch.tensor([0, 1, 2, 0, 1])
    q = mean_field(net)
    wide = MeanField(q.mean, {n: p / 1e6 for n, p in q.precision.items()}, q.prior_precision, 10)
    torch.testing.assert_close(
        leave_one_out(net, wide, [(x, y)], corrected=True).change, leave_one_out(net, wide, [(x, y)]).change
    )


def test_invalid_input_is_refused(net):
    with pytest.raises(DataError, match="no example to leave out"):
        leave_one_out(net, mean_field(net), [])
    with pytest.raises(HyperparameterError, match="samples=1 must be at least 2"):
        sensitivity(net, mean_field(net), [], samples=1)
