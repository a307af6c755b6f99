"""The linearised predictive against explicit Jacobians, plain sampling of linear models, and layers without derivatives."""

from __future__ import annotations

import pytest
import torch
from of_classes import mc_predict
from packaging.version import Version
from posterior_around import mean_field_around
from random_matrices import F64, spd
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.posteriors import BlockTridiagonal, FullGaussian, MatrixGaussian, ScaledPosterior
from lightning_bayes.predictive import (
    LinearizedSamples,
    MemberSamples,
    PosteriorSamples,
    RecalibratedSamples,
    recalibrate,
)

S = 5


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64).eval()


def posterior_of(family, model):
    """A posterior of `network`."""
    common = mean_field_around(model)
    if family == "mean_field":
        return common
    names = {"mean": common.mean, "prior_precision": common.prior_precision, "num_data": 10}
    biases = {"0.weight": "0.bias", "2.weight": "2.bias"}
    generator = torch.Generator().manual_seed(1)
    if family == "full":
        return FullGaussian(precision=spd(26, generator=generator), **names)
    factors = {"0.weight": (4, 4), "2.weight": (2, 5)}
    factors = {name: tuple(spd(n, generator=generator) for n in sides) for name, sides in factors.items()}
    if family == "matrix":
        return MatrixGaussian(factors=factors, biases=biases, precision={}, **names)
    links = {"0.weight": (torch.zeros(4, 2, dtype=F64), torch.zeros(4, 5, dtype=F64))}
    return BlockTridiagonal(factors=factors, links=links, biases=biases, **names)


def expansion_by_hand(model, posterior, x, count=S, **kwargs):
    """f + J (θ - μ) with the Jacobian written out, one gradient of one output after the other."""
    params = {name: p for name, p in model.named_parameters() if name in posterior.mean}
    for name, p in params.items():
        p.data.copy_(posterior.mean[name])
    samples = PosteriorSamples(posterior, count)
    outputs = model(x, **kwargs)
    expanded = outputs.detach().expand(count, *outputs.shape).clone()
    for place in torch.cartesian_prod(*(torch.arange(n) for n in outputs.shape)).tolist():
        grads = torch.autograd.grad(outputs[tuple(place)], list(params.values()), retain_graph=True, allow_unused=True)
        for k in range(count):
            away = {name: samples.weights(k)[name] - posterior.mean[name] for name in params}
            moved = (g * away[name] for name, g in zip(params, grads, strict=True) if g is not None)
            expanded[(k, *place)] += sum(each.sum() for each in moved)
    return expanded


def linearised(model, posterior, x, count=S):
    with torch.no_grad():
        return LinearizedSamples(PosteriorSamples(posterior, count)).outputs(model, lambda: model(x))


@pytest.mark.parametrize("family", ["mean_field", "matrix", "full", "block_tridiagonal", "scaled"])
def test_outputs_match_explicit_jacobians_for_every_family(family):
    model, x = network(), torch.randn(6, 3, dtype=F64)
    posterior = posterior_of("matrix" if family == "scaled" else family, model)
    posterior = ScaledPosterior(posterior, 0.7) if family == "scaled" else posterior
    found = mc_predict(model, posterior, x, S, link="identity", linearized=True).samples
    torch.testing.assert_close(found, expansion_by_hand(model, posterior, x))
    plain = mc_predict(model, posterior, x, S, link="identity").samples
    assert (found - plain).abs().max() > 0.01  # it is another predictive


def test_a_model_linear_in_its_weights_matches_plain_samples():
    model, x = nn.Linear(3, 4), torch.randn(7, 3)
    posterior = mean_field_around(model)
    plain, linear = (mc_predict(model, posterior, x, S, linearized=choice) for choice in (False, True))
    torch.testing.assert_close(linear.sample_probs, plain.sample_probs)
    torch.testing.assert_close(linear.mutual_information, plain.mutual_information)


@pytest.mark.parametrize("count", [1, 16, 33])
def test_grouped_samples_match_single_samples(count):
    model, x = network(), torch.randn(2, 3, dtype=F64)
    posterior = mean_field_around(model)
    samples, forward = LinearizedSamples(PosteriorSamples(posterior, count)), lambda: model(x)
    with torch.no_grad():
        one_by_one = torch.cat([samples.subset_outputs(model, forward, [k]) for k in range(count)])
        torch.testing.assert_close(samples.outputs(model, forward), one_by_one)


class Residual(nn.Module):
    """A network with in-place activations, +=, a tied weight, frozen weights and running statistics."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.again, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3, 2)
        self.again.weight = self.conv.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm.running_mean.normal_()

    def forward(self, x):
        hidden = self.norm(self.conv(x))
        hidden += self.again(x)
        return self.head(self.frozen(self.act(hidden).mean((2, 3))))


@pytest.mark.parametrize("inference", [False, True])
def test_a_convolutional_network_with_batch_norm_in_place_operations_and_tied_weights(inference):
    torch.manual_seed(0)
    model, x = Residual().to(F64).eval(), torch.randn(4, 1, 5, 5, dtype=F64)
    posterior = mean_field_around(model)
    for name in ("frozen.weight", "frozen.bias"):
        posterior.constants[name] = posterior.mean.pop(name)
        del posterior.precision[name]
    expected = expansion_by_hand(model, posterior, x)
    before = {name: value.clone() for name, value in (model.state_dict() | {"x": x}).items()}
    with torch.inference_mode(inference):
        found = mc_predict(model, posterior, x, S, link="identity", linearized=True).samples
    torch.testing.assert_close(found.clone(), expected)
    assert all(torch.equal(value, before[name]) for name, value in (model.state_dict() | {"x": x}).items())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=F64)
        self.query = nn.Linear(4, 12, dtype=F64)

    def forward(self, x):
        query, key, value = self.query(self.block(x)).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value).mean(1)


def test_attention_uses_the_differentiable_path_and_restores_the_fast_path():
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 3, 4, dtype=F64)
    posterior = mean_field_around(model)
    torch.testing.assert_close(linearised(model, posterior, x, 2), expansion_by_hand(model, posterior, x, 2))
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_posterior_replaces_the_models_weights_and_constants():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3)
    posterior = mean_field_around(model)
    wanted = mc_predict(model, posterior, x, S, linearized=True).probs
    own = torch.full_like(model[0].weight, 3.0)
    with torch.no_grad():
        model[0].weight.copy_(own)
        model[1].running_mean.fill_(9.0)
    assert torch.equal(mc_predict(model, posterior, x, S, linearized=True).probs, wanted)
    assert torch.equal(model[0].weight, own)
    assert model.training


def test_a_posterior_of_scale_zero_predicts_the_mean():
    model, x = network(), torch.randn(6, 3, dtype=F64)
    for linearized in (False, True):
        found = mc_predict(model, ScaledPosterior(mean_field_around(model), 0.0), x, 3, linearized=linearized)
        torch.testing.assert_close(found.probs, model(x).softmax(-1).detach())
        assert found.mutual_information.abs().max() < 1e-12


def test_a_scale_fitted_for_the_linearised_predictive_is_used_with_it():
    model, x = network(), torch.randn(6, 3, dtype=F64)
    plain, wide = mean_field_around(model), ScaledPosterior(mean_field_around(model), 2.0, linearized=True)
    as_chosen = mc_predict(model, wide, x, S).probs
    assert torch.equal(as_chosen, mc_predict(model, ScaledPosterior(plain, 2.0), x, S, linearized=True).probs)
    assert not torch.allclose(as_chosen, mc_predict(model, wide, x, S, linearized=False).probs)


def test_linearised_samples_use_the_recalibrated_statistics_of_the_mean():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.randn(64, 3)
    posterior = mean_field_around(model)
    found = mc_predict(model, posterior, x, S, link="identity", linearized=True, recalibrate_on=[x]).samples
    with torch.no_grad():
        hidden = model[0](x)
    posterior.constants["1.running_mean"] = hidden.mean(0)
    posterior.constants["1.running_var"] = hidden.var(0)
    expected = mc_predict(model, posterior, x, S, link="identity", linearized=True).samples
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    samples = LinearizedSamples(PosteriorSamples(posterior, S))
    with pytest.raises(HyperparameterError, match=r"LinearizedSamples are expansions of one network.*of='mean'"):
        recalibrate(model, samples, [lambda: model(x)])
    members = MemberSamples([dict(model.state_dict())])
    assert isinstance(recalibrate(model, members, [lambda: model(x)]), RecalibratedSamples)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Custom(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


def test_a_layer_without_forward_mode_derivative_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Custom()))
    with pytest.raises(
        UnsupportedLayerError, match=r"which 1\.1 \(Custom\) does not support: .*\(linearized=False\), or"
    ):
        mc_predict(model, mean_field_around(model), torch.randn(2, 3), 2, linearized=True)
    bag = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 2))
    with pytest.raises(UnsupportedLayerError, match=r"which 0 \(EmbeddingBag\) does not support: .*embedding_bag"):
        mc_predict(bag, mean_field_around(bag), torch.randint(5, (3, 4)), 2, linearized=True)
    assert not bag[0]._forward_hooks
    assert not bag[0]._forward_pre_hooks


def test_an_error_of_the_model_itself_is_not_replaced():
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mc_predict(model, mean_field_around(model), torch.randn(2, 7), 2, linearized=True)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch 2.5 and 2.7 cannot vmap checkpoints")
def test_activation_checkpointing_and_control_flow_on_values():
    class Branching(nn.Linear):
        def forward(self, x):
            outputs = checkpoint(super().forward, x, use_reentrant=False)
            return 2 * outputs if outputs.sum() > 0 else 3 * outputs

    torch.manual_seed(0)
    model, x = Branching(3, 2, dtype=F64), torch.randn(4, 3, dtype=F64)
    posterior = mean_field_around(model)
    torch.testing.assert_close(linearised(model, posterior, x), expansion_by_hand(model, posterior, x))
