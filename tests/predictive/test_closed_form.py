"""The linearised predictive in closed form, against Jacobians, samples and quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from of_classes import mc_predict
from torch import nn
from torch.func import functional_call, jacrev

from lightning_bayes import laplace
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.errors import ExampleDimensionError, HyperparameterError
from lightning_bayes.likelihood import find_kind
from lightning_bayes.posteriors import FullGaussian, MeanField, ScaledPosterior
from lightning_bayes.predictive import LinearizedSamples, PosteriorSamples, output_moments, probit
from lightning_bayes.predictive.closed_form import BatchMoments, Room, probit_samples, spread_points
from lightning_bayes.predictive.scores import mutual_information

F64 = torch.float64


@pytest.fixture
def net():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 3)).double().eval()
    )


@pytest.fixture
def x(generator):
    return torch.randn(6, 2, 4, generator=generator, dtype=F64)


def means(model, names=None):
    return {n: p.detach().clone() for n, p in model.named_parameters() if names is None or n in names}


def full(model, generator, names=None, width=0.1):
    mean = means(model, names)
    size = sum(value.numel() for value in mean.values())
    root = torch.randn(size, size, generator=generator, dtype=F64) / width / size**0.5
    precision = root @ root.T + torch.eye(size, dtype=F64) / width**2
    constants = {n: v for n, v in model.state_dict().items() if n not in mean}
    return FullGaussian(mean, precision, dict.fromkeys(mean, 1.0), 10, constants)


def mean_field(model):
    mean = means(model)
    precision = {name: 50 + value.abs() * 100 for name, value in mean.items()}
    constants = {n: v for n, v in model.state_dict().items() if n not in mean}
    return MeanField(mean, precision, dict.fromkeys(mean, 1.0), 10, constants)


def expected_variance(model, posterior, x):
    jacobians = jacrev(lambda weights: functional_call(model, weights, (x,)))(posterior.mean)
    joint = torch.cat([jacobians[name].flatten(2) for name in posterior.mean], 2)
    if isinstance(posterior, FullGaussian):
        return torch.einsum("bcp,pq,bcq->bc", joint, torch.linalg.inv(posterior.precision), joint)
    return (joint.square() / torch.cat([p.flatten() for p in posterior.precision.values()])).sum(2)


def test_moments_match_explicit_jacobians(net, x, generator):
    for posterior in (mean_field(net), full(net, generator), full(net, generator, {"0.weight", "4.bias"})):
        mean, variance = output_moments(net, posterior, lambda: net(x))
        torch.testing.assert_close(mean, net(x).detach())
        torch.testing.assert_close(variance, expected_variance(net, posterior, x))
        _, scaled = output_moments(net, ScaledPosterior(posterior, 0.5), lambda: net(x))
        torch.testing.assert_close(scaled, variance / 4)


class Tokens(nn.Module):
    """Linear layers at three positions, convolutions at four and at one, one of them in groups."""

    def __init__(self):
        super().__init__()
        self.conv, self.grouped, self.last = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 6, 2, groups=2), nn.Conv2d(6, 9, 1)
        self.tokens, self.head = nn.Linear(3, 5), nn.Linear(15, 2)

    def forward(self, x):
        x = self.last(self.grouped(self.conv(x).tanh()).tanh()).tanh()
        return self.head(self.tokens(x.view(-1, 3, 3)).tanh().flatten(1))


def test_moments_of_layers_with_few_positions_match_explicit_jacobians(generator):
    torch.manual_seed(0)
    net, x = Tokens().double().eval(), torch.randn(5, 2, 4, 4, generator=generator, dtype=F64)
    batches = [(x, torch.randint(2, (5,), generator=generator))]
    options = {"structure": "kronecker", "subset": "all", "prior_precision": 1.0, "require_trained": False}
    kronecker = laplace(net, batches, **options).posterior
    jacobians = jacrev(lambda weights: functional_call(net, weights, (x,)))(kronecker.mean)
    expected = [kronecker.variance_along({name: j[:, c] for name, j in jacobians.items()}) for c in range(2)]
    torch.testing.assert_close(output_moments(net, kronecker, lambda: net(x))[1], torch.stack(expected, 1))
    for posterior in (mean_field(net), full(net, generator)):
        _, variance = output_moments(net, posterior, lambda: net(x))
        torch.testing.assert_close(variance, expected_variance(net, posterior, x))


def test_stored_derivatives_give_the_moments_of_another_posterior_and_share_inputs(generator):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(5, 4, dtype=F64)
    room, calls = Room(10_000), []
    batch = BatchMoments(FusedEngine(net, "sum"), lambda: calls.append(1) or net(x), room)
    first, second = mean_field(net), full(net, generator)
    for posterior in (first, second, first):
        mean, variance = batch.under(posterior)
        torch.testing.assert_close(mean, net(x).detach())
        torch.testing.assert_close(variance, expected_variance(net, posterior, x))
    gradients = 2 * (6 + 3)  # of weights and biases
    assert (len(calls), 10_000 - room.elements) == (1, 5 * (4 + 6) + 3 * 5 * gradients)


def test_contributions_of_shared_layers_are_summed_before_squaring(x, generator):
    layer = nn.Linear(4, 4)
    net = nn.Sequential(layer, nn.Tanh(), layer).double()
    posterior, inputs = mean_field(net), x[:, 0]
    _, variance = output_moments(net, posterior, lambda: net(inputs))
    torch.testing.assert_close(variance, expected_variance(net, posterior, inputs))


def test_moments_match_linearised_samples(net, x, generator):
    posterior = full(net, generator)
    draws = LinearizedSamples(PosteriorSamples(posterior, 2000)).outputs(net, lambda: net(x))
    _, variance = output_moments(net, posterior, lambda: net(x))
    assert ((draws.var(0) / variance - 1) / math.sqrt(2 / 2000)).abs().max() < 4


def test_the_probit_approximates_the_average_of_a_sigmoid():
    f, v = torch.linspace(-4, 4, 9, dtype=F64), torch.tensor(2.0, dtype=F64)
    grid = torch.linspace(-8, 8, 2001, dtype=F64)
    weights = (-grid.square() / 2).exp()
    exact = ((f[:, None] + v.sqrt() * grid).sigmoid() * weights).sum(1) / weights.sum()
    assert (probit(f, v.expand(9)).sigmoid() - exact).abs().max() < 0.01
    assert (f.sigmoid() - exact).abs().max() > 0.05  # without it


def test_mc_predict_supports_the_closed_form(net, x, generator):
    posterior = full(net, generator)
    mean, variance = output_moments(net, posterior, lambda: net(x))
    found = mc_predict(net, posterior, x, linearized="closed_form")
    torch.testing.assert_close(found.probs, probit(mean, variance).softmax(1), rtol=1e-5, atol=1e-5)
    normal = mean + variance.sqrt() * torch.randn(20_000, 6, 3, generator=generator, dtype=F64)
    expected = mutual_information(normal.softmax(-1))
    many = mc_predict(net, posterior, x, samples=512, linearized="closed_form").mutual_information
    torch.testing.assert_close(many, expected, rtol=0.15, atol=1e-4)  # the probit's average is not the exact one
    values = mc_predict(net, posterior, x, samples=16, link="identity", linearized="closed_form")
    torch.testing.assert_close(values.mean, mean)
    torch.testing.assert_close(values.variance, variance)


@pytest.mark.parametrize(("link", "dim"), [("softmax", 1), ("softmax_last", -1)])
def test_samples_average_to_the_probit_and_equal_it_without_variance(link, dim, generator):
    outputs = 3 * torch.randn(5, 4, 6, generator=generator)
    variance = 5 * torch.rand(5, 4, 6, generator=generator)
    prediction = probit(outputs, variance)
    drawn = probit_samples(outputs, variance, prediction, 8, dim)
    assert drawn.std(0).min() > 0
    found = find_kind(link).probs(drawn).mean(0)
    torch.testing.assert_close(found, prediction.softmax(dim), rtol=0, atol=2e-6)
    certain = find_kind(link).probs(probit_samples(outputs, torch.zeros_like(outputs), outputs, 8, dim))
    torch.testing.assert_close(certain, outputs.softmax(dim).expand_as(certain))


def test_points_have_mean_0_and_variance_1():
    for count in (2, 5, 32):
        points = spread_points(count)
        assert abs(float(points.mean())) < 1e-12
        assert float(points.square().mean()) == pytest.approx(1.0)
    assert spread_points(1).tolist() == [0.0]


def test_the_model_is_unchanged(net, x, generator):
    posterior = full(net, generator, {"4.weight"})
    with torch.no_grad():
        net[4].weight.add_(1.0)
    own, required = net[4].weight.detach().clone(), [param.requires_grad for param in net.parameters()]
    output_moments(net, posterior, lambda: net(x))
    assert torch.equal(net[4].weight, own)
    assert [param.requires_grad for param in net.parameters()] == required
    assert all(param.grad is None for param in net.parameters())


def test_an_unknown_predictive_is_refused(net, x, generator):
    with pytest.raises(HyperparameterError, match=r"linearized='probit' is unknown; use False, True or 'closed_form'"):
        mc_predict(net, mean_field(net), x, linearized="probit")


def test_a_forward_over_chunks_of_the_batch_is_refused(net, x):
    with pytest.raises(ExampleDimensionError, match=r"sees 2 examples but the outputs have 6"):
        output_moments(net, mean_field(net), lambda: torch.cat([net(part) for part in x.split(2)]))
