"""A fixed set of weight samples, and models that are themselves again afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from posterior_around import mean_field_around
from torch import nn

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors import MeanField
from lightning_bayes.predictive import PosteriorSamples, check_fits, samples, temporary_weights


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_cached_and_redrawn_samples_are_equal(monkeypatch):
    posterior = mean_field_around(model())
    kept = PosteriorSamples(posterior, 3, seed=7)
    assert kept.weights(1) is kept.weights(1)
    monkeypatch.setattr(samples, "CACHED_ELEMENTS", 10)
    drawn = PosteriorSamples(posterior, 3, seed=7)
    assert drawn.weights(1) is not drawn.weights(1)
    assert all(equal(kept.weights(k), drawn.weights(k)) for k in (2, 0, 1))


def test_samples_differ_by_index_and_seed():
    posterior = mean_field_around(model())
    drawn = [PosteriorSamples(posterior, 4, seed).weights(k)["0.weight"] for seed in range(4) for k in range(4)]
    assert len({tuple(w.flatten().tolist()) for w in drawn}) == 16


def test_a_sample_is_drawn_from_the_posterior_with_its_seed():
    posterior = mean_field_around(model())
    first = PosteriorSamples(posterior, 1, seed=0).weights(0)
    assert equal(first, posterior.sample(torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("count", [2, 10])
def test_the_average_of_the_samples_is_the_posterior_mean(count, is_cached, monkeypatch):
    monkeypatch.setattr(samples, "CACHED_ELEMENTS", 2**26 if is_cached else 0)
    q = mean_field_around(model())
    draws = PosteriorSamples(q, count)
    for name, mean in q.mean.items():
        average = torch.stack([draws.weights(index)[name] for index in range(count)]).mean(0)
        torch.testing.assert_close(average, mean, rtol=0, atol=1e-6)


def test_every_sample_has_the_posteriors_distribution():
    """Mean and variance of one weight in each of three samples over many seeds, in standard errors."""
    q = MeanField({"w": torch.full((1,), 2.0)}, {"w": torch.full((1,), 4.0)}, {"w": 1.0}, num_data=1)
    drawn = torch.tensor(
        [[PosteriorSamples(q, 3, seed).weights(i)["w"].item() for i in range(3)] for seed in range(4000)]
    )
    z = (drawn - 2.0) * 2.0
    assert (z.mean(0) * len(z) ** 0.5).abs().max() < 4
    assert ((z.square().mean(0) - 1) / (2 / len(z)) ** 0.5).abs().max() < 4


def test_predictions_of_few_samples_are_unbiased_and_much_closer_to_the_integral():
    """Ten samples of a logistic model, against Gauss-Hermite quadrature and against ten independent draws."""
    mean, std, count = 0.8, 0.5, 10
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    truth = float((weights / (1 + np.exp(-(mean + std * nodes)))).sum() / weights.sum())
    q = MeanField({"w": torch.tensor([mean])}, {"w": torch.tensor([std**-2])}, {"w": 1.0}, num_data=1)
    draws = [PosteriorSamples(q, count, seed) for seed in range(500)]
    matched, independent = (
        torch.stack([torch.stack([value["w"] for value in values]).sigmoid().mean() for values in sets]) - truth
        for sets in (
            [[each.weights(i) for i in range(count)] for each in draws],
            [[each._draw(i) for i in range(count)] for each in draws],
        )
    )
    assert abs(matched.mean() / matched.std()) * len(matched) ** 0.5 < 4
    assert matched.square().mean() < 0.1 * independent.square().mean()


def test_outputs_match_an_explicit_loop():
    net, x = model(), torch.randn(5, 3)
    drawn = PosteriorSamples(mean_field_around(net), 4, seed=1)
    expected = [torch.func.functional_call(net, drawn.weights(k), (x,)) for k in range(4)]
    torch.testing.assert_close(drawn.outputs(net, lambda: net(x)), torch.stack(expected), rtol=0, atol=0)


def test_placed_weights_are_replaced_by_the_originals_bit_for_bit():
    net = model()
    before = {n: v.clone() for n, v in net.state_dict().items()}
    pointers = {n: v.data_ptr() for n, v in net.state_dict().items()}
    given = {"0.bias": torch.full((4,), 9.0), "1.running_mean": torch.full((4,), 3.0)}
    with temporary_weights(net, given):
        assert torch.equal(net[0].bias, given["0.bias"])
        assert torch.equal(net[1].running_mean, given["1.running_mean"])
        assert torch.equal(net[0].weight, before["0.weight"])
    assert equal(net.state_dict(), before)
    assert {n: v.data_ptr() for n, v in net.state_dict().items()} == pointers


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_original_weights_are_restored_after_an_exception(error):
    net = model()
    before = {n: v.clone() for n, v in net.state_dict().items()}
    with pytest.raises(error, match="inside"), temporary_weights(net, {"0.bias": torch.full((4,), 9.0)}):
        raise error("inside")
    assert equal(net.state_dict(), before)


def test_a_value_of_another_shape_leaves_the_model_unchanged():
    net = model()
    before = {n: v.clone() for n, v in net.state_dict().items()}
    wrong = {"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(5)}
    with pytest.raises(RuntimeError, match="size of tensor"), temporary_weights(net, wrong):
        pytest.fail("nothing runs with half of the weights")
    assert equal(net.state_dict(), before)


def test_misfits_are_listed_with_the_next_step():
    net = model()
    good = mean_field_around(net)
    mean = {n: m for n, m in good.mean.items() if n != "2.bias"} | {"head.weight": torch.zeros(1)}
    mean["0.weight"] = torch.zeros(4, 5)
    other = MeanField(mean, {n: torch.ones_like(m) for n, m in mean.items()}, dict.fromkeys(mean, 1.0), 10)
    message = (
        r"does not fit this Sequential \(missing: 1\.num_batches_tracked, 1\.running_mean, "
        r"1\.running_var, 2\.bias; unknown to the model: head\.weight; of another shape: 0\.weight\)"
        r".*posterior\.select\('model\.'\)"
    )
    with pytest.raises(PosteriorError, match=message):
        check_fits(net, other)
