"""Optimizers with a joint posterior over all weights: exact regression, autograd's curvature, noise, resume, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on, weights
from torch import nn

from lightning_bayes.curvature.hessian import hessian_of
from lightning_bayes.errors import (
    HyperparameterError,
    NotPositiveDefiniteError,
    PosteriorError,
    ShapeError,
    UnsupportedLayerError,
    UnsupportedTrainingError,
)
from lightning_bayes.likelihood import Categorical, Gaussian
from lightning_bayes.optim import VONG, BlockTridiagonalKFAC, FullVON, NNGFull
from lightning_bayes.posteriors import BlockTridiagonal, FullGaussian

F64 = torch.float64
FULL = [FullVON, VONG, NNGFull]
ALL = [*FULL, BlockTridiagonalKFAC]
every_optimizer = pytest.mark.parametrize("optimizer", ALL, ids=lambda cls: cls.__name__)


def small(dtype=F64, out=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)).to(dtype)


@pytest.fixture
def data(generator):
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    return x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2]


def build(optimizer, model, **arguments):
    arguments = {"num_data": 40, "lr": 0.05, **arguments}
    draws = optimizer in {NNGFull, BlockTridiagonalKFAC}
    return optimizer(model, **({"likelihood": Gaussian(1.0)} if draws else {}), **arguments)


def loss_of(model, x, y):
    return 0.5 * (model(x) - y).square().mean()


def train(model, opt, data, steps):
    train_on(opt, lambda: loss_of(model, *data), steps)


def dense_precision(posterior):
    """Precision of all weights in the order of the mean, by second differences of the Gaussian log-density."""
    shapes = {name: mean.shape for name, mean in posterior.mean.items()}
    start = torch.cat([mean.flatten() for mean in posterior.mean.values()])

    def log_density(flat):
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return -posterior.log_prob(named)

    return torch.autograd.functional.hessian(log_density, start)


# -- the curvature ------------------------------------------------------------------------------------------------------


def test_one_step_of_von_is_bayesian_linear_regression(data):
    x, y = data
    model = nn.Linear(3, 1).double()
    opt = FullVON(model, lr=1.0, betas=(0.0, 0.0), num_data=40, prior_precision=2.0)
    train(model, opt, data, 1)
    rows = torch.nn.functional.pad(x, (0, 1), value=1.0)
    precision = rows.mT @ rows + 2.0 * torch.eye(4, dtype=F64)
    torch.testing.assert_close(opt.posterior().precision, precision)
    torch.testing.assert_close(weights(model), torch.linalg.solve(precision, rows.mT @ y)[:, 0])


def test_the_hessian_of_a_summed_loss_counts_as_that_of_its_mean(data):
    x, y = data
    precisions = {}
    for reduction in ("mean", "sum"):
        model = nn.Linear(3, 1).double()
        opt = FullVON(model, lr=1e-3, betas=(0.0, 0.0), num_data=40, prior_precision=2.0)
        train_on(opt, lambda model=model, reduction=reduction: 0.5 * F.mse_loss(model(x), y, reduction=reduction))
        precisions[reduction] = opt.posterior().precision
    torch.testing.assert_close(precisions["sum"], precisions["mean"])


def test_the_hessian_equals_torchs_own(data):
    model = small()
    params = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]

    def loss(*values):
        return (
            0.5
            * (torch.func.functional_call(model, dict(zip(names, values, strict=True)), data[0]) - data[1])
            .square()
            .mean()
        )

    blocks = torch.autograd.functional.hessian(loss, tuple(params))
    rows = [
        torch.cat([block.reshape(p.numel(), -1) for block in row], 1) for p, row in zip(params, blocks, strict=True)
    ]
    torch.testing.assert_close(hessian_of(loss_of(model, *data), params), torch.cat(rows))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_vong_keeps_the_mean_outer_product_of_example_gradients(reduction, generator):
    """With a convolution, whose gradient is a sum over positions."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)).double()
    x, y = torch.randn(6, 2, 4, generator=generator, dtype=F64), torch.tensor([0, 1, 0, 1, 1, 0])
    outer = []
    for i in range(6):
        grads = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in grads])
        outer.append(torch.outer(flat, flat))
    opt = VONG(model, num_data=100, prior_precision=3.0)
    train_on(opt, lambda: F.cross_entropy(model(x), y, reduction=reduction))
    expected = 100 * torch.stack(outer).mean(0) + 3.0 * torch.eye(len(outer[0]), dtype=F64)
    torch.testing.assert_close(opt.posterior().precision, expected)


def test_nng_full_expects_the_exact_precision_of_linear_regression(generator):
    """Sampled labels have E[(y - f)²] = 1/τ for any labels of the data; the standard error is that of the mean of ε²."""
    x = torch.randn(20_000, 2, generator=generator, dtype=F64)
    model = nn.Linear(2, 1, bias=False).double()
    opt = NNGFull(model, num_data=20_000, likelihood=Gaussian(0.5))
    with opt.sampled_params():
        (2.0 * (model(x) - 7.0).square()).mean().backward()  # 1 / (2 · 0.5²)
    opt.step()
    exact = 4.0 * x.mT @ x + torch.eye(2, dtype=F64)
    errors = 4.0 * (2 * (x[:, :, None] * x[:, None]).square().sum(0)).sqrt()
    assert ((opt.posterior().precision - exact) / errors).abs().max() < 4


def test_the_first_block_tridiagonal_step_is_the_natural_one(data):
    """For two layers the approximation keeps all blocks, so the step uses the inverse of the posterior precision."""
    model = small()
    before, (x, y) = weights(model), data
    opt = build(BlockTridiagonalKFAC, model, fisher="empirical", betas=(0.0, 0.9), prior_precision=4.0)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))])
    train(model, opt, data, 1)
    per_example = dense_precision(opt.posterior()) / 40
    move = torch.linalg.solve(per_example, gradient + 0.1 * before)
    torch.testing.assert_close(weights(model), before - 0.05 * move, rtol=1e-6, atol=1e-9)


def test_the_blocks_between_layers_are_the_moments_of_both(data):
    model, (x, y) = small(), data
    opt = build(BlockTridiagonalKFAC, model, fisher="empirical")
    inputs = [x, model[1](model[0](x))]
    pre = [model[0](x).detach().requires_grad_()]
    outputs = model[2](model[1](pre[0]))
    back = [torch.autograd.grad((0.5 * (outputs - y).square()).sum(), pre)[0], (outputs - y).detach()]
    train(model, opt, data, 1)
    left, right = opt.posterior().links["0.weight"]
    ones = [torch.nn.functional.pad(part.detach(), (0, 1), value=1.0) for part in inputs]
    torch.testing.assert_close(left, 40 * back[0].mT @ back[1] / 40)
    torch.testing.assert_close(right, ones[0].mT @ ones[1] / 40)


# -- passes and steps ---------------------------------------------------------------------------------------------------


@every_optimizer
def test_samples_have_the_posteriors_covariance(optimizer, data):
    model = small()
    opt = build(optimizer, model, init_precision=300.0, prior_precision=5.0)
    train(model, opt, data, 3)
    mean, draws = weights(model), []
    for _ in range(2000):
        with torch.no_grad(), opt.sampled_params():
            draws.append(weights(model) - mean)
    assert torch.equal(weights(model), mean)
    covariance = torch.linalg.inv(dense_precision(opt.posterior()))
    drawn = torch.stack(draws)
    errors = ((covariance.diagonal()[:, None] * covariance.diagonal() + covariance**2) / len(drawn)).sqrt()
    assert ((drawn.mT @ drawn / len(drawn) - covariance) / errors).abs().max() < 4.5  # of 21² entries


@pytest.mark.parametrize("in_noise", [False, True])
@every_optimizer
def test_damping_is_in_the_step_and_only_where_asked_in_the_noise(optimizer, in_noise, data):
    samples = []
    for damping in (0.0, 0.5):
        model = small()
        opt = build(optimizer, model, lr=0.0, prior_precision=200.0, damping=damping, damping_in_noise=in_noise)
        train(model, opt, data, 1)  # measures, but moves nothing
        with torch.no_grad(), opt.sampled_params(0):
            samples.append(weights(model))
    assert torch.equal(*samples) != in_noise


@every_optimizer
def test_frozen_parameters_are_constants_of_the_posterior(optimizer, data):
    model = small()
    if optimizer is not BlockTridiagonalKFAC:  # whose chain is whole
        model[0].requires_grad_(False)
    opt = build(optimizer, model, init_precision=200.0)
    frozen = model[0].weight.clone()
    train(model, opt, data, 2)
    posterior = opt.posterior()
    assert type(posterior) is (BlockTridiagonal if optimizer is BlockTridiagonalKFAC else FullGaussian)
    assert set(posterior.mean) | set(posterior.constants) == set(model.state_dict())
    if optimizer is not BlockTridiagonalKFAC:
        assert torch.equal(posterior.constants["0.weight"], frozen)


@every_optimizer
def test_init_precision_is_the_first_posteriors(optimizer, data):
    opt = build(optimizer, small(), init_precision=200.0, prior_precision=2.0)
    torch.testing.assert_close(dense_precision(opt.posterior()), 200.0 * torch.eye(21, dtype=F64))


# -- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", FULL, ids=lambda cls: cls.__name__)
def test_a_model_too_large_is_refused_with_the_memory_it_would_take(optimizer):
    with pytest.raises(PosteriorError, match=r"20,100 × 20,100 numbers, would take 1\.5 GiB, more than limit_mib=1024"):
        build(optimizer, nn.Linear(200, 100))


def test_a_chain_too_large_is_refused_with_the_memory_it_would_take():
    with pytest.raises(PosteriorError, match=r"2 linear layers.* would take .*KiB, more than limit_mib=0\.01"):
        build(BlockTridiagonalKFAC, nn.Sequential(nn.Linear(90, 90), nn.Linear(90, 90)), limit_mib=0.01)


@every_optimizer
def test_half_precision_is_refused(optimizer):
    with pytest.raises(UnsupportedTrainingError, match=r"stored as torch\.bfloat16"):
        build(optimizer, small(torch.bfloat16))


def test_a_model_of_another_shape_is_refused_by_name():
    normed = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    for optimizer in (VONG, NNGFull):
        with pytest.raises(UnsupportedLayerError, match=rf"{optimizer.__name__} supports only .* excludes 1\. Freeze"):
            build(optimizer, normed)
    with pytest.raises(PosteriorError, match=r"chain of nn\.Linear layers, but Sequential has 1 \(LayerNorm\)"):
        build(BlockTridiagonalKFAC, normed)
    build(FullVON, normed)  # twice differentiable


def test_layers_with_positions_have_no_blocks_between_them(data):
    model = small()
    opt = build(BlockTridiagonalKFAC, model, fisher="empirical")
    with pytest.raises(ShapeError, match=r"one position per example, but 0, 2 had several"), opt.sampled_params():
        loss_of(model, data[0].view(20, 2, 3), data[1].view(20, 2, 1)).backward()


def test_a_hessian_without_a_posterior_is_refused(data):
    model = small()
    opt = FullVON(model, num_data=40, prior_precision=1e-6)
    with opt.sampled_params():
        (-loss_of(model, *data)).backward()
    with pytest.raises(NotPositiveDefiniteError, match=r"eigenvalues range from -.*larger damping or prior_precision"):
        opt.step()


def dead():
    """A model whose first layer has zero activations and gradients for all inputs."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(F64)
    nn.init.constant_(model[0].bias, -1e3)
    return model


@every_optimizer
def test_a_dead_layer_keeps_its_prior(optimizer, data):
    model = dead()
    opt = build(optimizer, model, prior_precision=4.0, lr=1e-3)
    train(model, opt, data, 2)
    first = dense_precision(opt.posterior())[:12, :12]  # the weights of the first layer
    torch.testing.assert_close(first, 4.0 * torch.eye(12, dtype=F64), rtol=1e-3, atol=1e-3)


def test_a_vanishing_factor_without_prior_and_damping_names_layer_and_factor(data):
    model = dead()
    opt = build(BlockTridiagonalKFAC, model, num_data=10**30, prior_precision=1e-300)  # whose quotient is zero
    with pytest.raises(NotPositiveDefiniteError, match=r"factor S of layer '0'.*Use a larger damping"):
        train(model, opt, data, 1)


def test_labels_that_cannot_be_drawn_are_refused():
    with pytest.raises(
        HyperparameterError, match=r"fisher='sampled' requires a likelihood.*likelihood=Categorical\(\)"
    ):
        NNGFull(small())
    NNGFull(small(out=2), likelihood=Categorical())


@every_optimizer
def test_several_groups_and_a_missing_size_are_refused(optimizer, data):
    model = small()
    opt = build(optimizer, model, num_data=None)
    with pytest.raises(UnsupportedTrainingError, match="so it has one parameter group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with opt.sampled_params():
        loss_of(model, *data).backward()
    with pytest.raises(HyperparameterError, match="num_data is not set"):
        opt.step()


@every_optimizer
def test_there_is_no_posterior_before_the_first_update(optimizer):
    with pytest.raises(PosteriorError, match=f"{optimizer.__name__} has no posterior before its first update"):
        build(optimizer, small()).posterior()
