"""mc_predict against an explicit loop and closed forms; the model is restored afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from of_classes import mc_predict
from posterior_around import mean_field_around
from torch import nn

from lightning_bayes.errors import HyperparameterError, PosteriorError, ShapeError
from lightning_bayes.posteriors import MeanField
from lightning_bayes.predictive import PosteriorSamples

F64 = torch.float64


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


def test_the_prediction_matches_an_explicit_loop_over_samples():
    model, x = network().eval(), torch.randn(6, 3)
    posterior = mean_field_around(model)
    found = mc_predict(model, posterior, x, samples=5, seed=3)
    drawn = PosteriorSamples(posterior, 5, seed=3)
    each = [torch.func.functional_call(model, drawn.weights(k), (x,)).softmax(-1) for k in range(5)]
    torch.testing.assert_close(found.sample_probs, torch.stack(each))
    torch.testing.assert_close(found.probs, torch.stack(each).mean(0))
    assert found.sample_probs.std(0).min() > 0
    assert not found.probs.requires_grad


def test_equal_seeds_predict_equally_for_any_batch():
    model, x = network(), torch.randn(6, 3)
    posterior = mean_field_around(model)
    whole, again, other = (mc_predict(model, posterior, x, samples=4, seed=s).probs for s in (1, 1, 2))
    assert torch.equal(whole, again)
    assert not torch.equal(whole, other)
    rows = torch.cat([mc_predict(model, posterior, x[i : i + 2], samples=4, seed=1).probs for i in (0, 2, 4)])
    torch.testing.assert_close(rows, whole)


def test_numpy_arrays_take_the_dtype_of_the_weights():
    model, x = network(), torch.randn(6, 3)
    posterior = mean_field_around(model)
    found = mc_predict(model, posterior, x.double().numpy(), samples=4)
    assert torch.equal(found.probs, mc_predict(model, posterior, x, samples=4).probs)


class Breaks(nn.Module):
    """Raises from the second call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt("enough")
        return x


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_is_restored(breaks):
    model = nn.Sequential(*network(), Breaks() if breaks else nn.Identity())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model.train()
    model[1].eval()  # a mixture of modes, as in fine-tuning
    modes = [m.training for m in model.modules()]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    constants = {"1.running_mean": torch.full((8,), 2.0)}
    posterior, rng = mean_field_around(model, constants=constants), torch.get_rng_state()
    if breaks:
        with pytest.raises(KeyboardInterrupt, match="enough"):
            mc_predict(model, posterior, torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), samples=3)
    else:
        mc_predict(model, posterior, torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), samples=3)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())


def test_the_posteriors_batchnorm_statistics_replace_the_models():
    model, x = network(), torch.randn(6, 3)
    posterior = mean_field_around(model, constants={"1.running_mean": torch.full((8,), 0.7)})
    wanted = mc_predict(model, posterior, x, samples=3).probs
    with torch.no_grad():
        model[1].running_mean.fill_(-5.0)
        model[0].weight.zero_()
    assert torch.equal(mc_predict(model, posterior, x, samples=3).probs, wanted)
    assert not torch.allclose(mc_predict(model, mean_field_around(model), x, samples=3).probs, wanted, atol=1e-3)


def test_linear_regression_matches_its_closed_form(generator):
    """y = θᵀx with θ ~ N(μ, diag(1/P)): mean μᵀx and variance Σ_j x_j²/P_j, in standard errors."""
    model, x = nn.Linear(4, 1, bias=False, dtype=F64), torch.randn(7, 4, generator=generator, dtype=F64)
    mean, precision = (
        torch.randn(1, 4, generator=generator, dtype=F64),
        torch.tensor([[0.5, 2.0, 9.0, 100.0]], dtype=F64),
    )
    posterior = MeanField({"weight": mean}, {"weight": precision}, {"weight": 1.0}, 10)
    count = 4000
    found = mc_predict(model, posterior, x, samples=count, link="identity")
    covariance = torch.diag(1 / precision[0])
    variance = torch.einsum("bi,ij,bj->b", x, covariance, x)[:, None]
    assert ((found.mean - x @ mean.T) / (variance / count).sqrt()).abs().max() < 4
    assert ((found.variance / variance - 1) / math.sqrt(2 / count)).abs().max() < 4


def test_a_linear_classifiers_probability_is_the_average_over_gaussian_logits(generator):
    """One logit θᵀx ~ N(m, v): the mean probability is a one-dimensional integral, taken by quadrature."""
    model, x = nn.Linear(2, 1, bias=False, dtype=F64), torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=F64)
    mean, precision = torch.tensor([[0.4, -0.3]], dtype=F64), torch.tensor([[1.0, 0.25]], dtype=F64)
    count = 4000
    found = mc_predict(
        model, MeanField({"weight": mean}, {"weight": precision}, {"weight": 1.0}, 1), x, count, link="sigmoid"
    )
    m, v = x @ mean.T, (x.square() / precision).sum(1, keepdim=True)
    z = torch.linspace(-9, 9, 4001, dtype=F64)
    weights = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    values = (m + v.sqrt() * z).sigmoid()
    truth = torch.trapezoid(values * weights, z, dim=1)[:, None]
    spread = torch.trapezoid(values.square() * weights, z, dim=1)[:, None] - truth.square()
    assert ((found.probs - truth) / (spread / count).sqrt()).abs().max() < 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())


def test_tied_weights_are_sampled_once():
    """The state dict names a tied weight twice, the posterior samples it once: both uses see the sample."""
    model, x = Tied(), torch.randn(5, 3)
    posterior = mean_field_around(model)
    assert "decoder.weight" in posterior.constants
    found = mc_predict(model, posterior, x, samples=2)
    for k in range(2):
        w = PosteriorSamples(posterior, 2).weights(k)
        hidden = (x @ w["encoder.weight"].T + w["encoder.bias"]).tanh()
        expected = hidden @ w["encoder.weight"].T + w["decoder.bias"]
        torch.testing.assert_close(found.sample_probs[k], expected.softmax(-1))


def test_a_module_with_extra_state_predicts():
    class WithExtra(nn.Linear):
        def get_extra_state(self):
            return {"version": 2}

        def set_extra_state(self, state):
            pass

    model = WithExtra(3, 2)
    mean = {n: p.detach() for n, p in model.named_parameters()}
    posterior = MeanField(mean, {n: torch.ones_like(m) for n, m in mean.items()}, dict.fromkeys(mean, 1.0), 1)
    assert mc_predict(model, posterior, torch.ones(5, 3), samples=2).probs.shape == (5, 2)


def test_a_posterior_of_the_whole_lightning_module_suggests_select():
    model = network()
    whole = mean_field_around(nn.ModuleDict({"model": model}))
    with pytest.raises(PosteriorError, match=r"unknown to the model: model\.0\.bias.*posterior\.select\('model\.'\)"):
        mc_predict(model, whole, torch.zeros(1, 3))
    assert mc_predict(model, whole.select("model."), torch.zeros(1, 3), samples=2).probs.shape == (1, 4)


def test_fewer_than_one_sample_is_refused():
    model = network()
    with pytest.raises(HyperparameterError, match=r"samples=0 must be at least 1"):
        mc_predict(model, mean_field_around(model), torch.zeros(1, 3), samples=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    model = network()
    with pytest.raises(HyperparameterError, match=f"temperature={temperature} must be positive"):
        mc_predict(model, mean_field_around(model), torch.ones(1, 3), temperature=temperature)
    with pytest.raises(HyperparameterError, match=r"temperature=2\.0 .* 1 for outputs that are not logits"):
        mc_predict(model, mean_field_around(model), torch.ones(1, 3), link="identity", temperature=2.0)


def test_an_output_that_cannot_be_averaged_is_refused():
    class Named(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    model = Named(3, 2)
    with pytest.raises(ShapeError, match="Named returned a dict, which cannot be averaged over samples"):
        mc_predict(model, mean_field_around(model), torch.zeros(1, 3), samples=2)
