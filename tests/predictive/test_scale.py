"""The width of a posterior by validation NLL: against closed forms, a fine grid, and a model whose posterior is known."""

from __future__ import annotations

import math

import pytest
import torch
from random_matrices import F64
from torch import nn
from torch.distributions import Normal

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.posteriors import FullGaussian, ScaledPosterior
from lightning_bayes.predictive import combine, fit_scale, mc_predict, predictive_nll
from lightning_bayes.predictive.densities import fit_noise_std
from lightning_bayes.predictive.scale import LARGEST, SMALLEST

# -- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [0.07, 0.4, 1.0, 3.3, 50.0])
def test_a_minimum_inside_the_range_is_found(best):
    found = fit_scale(lambda c: math.log1p((c - best) ** 2))
    assert found.scale == pytest.approx(best, rel=0.02)
    assert found.nll <= found.nll_of_mean == math.log1p(best**2)


def test_the_mean_wins_ties_up_to_rounding():
    assert fit_scale(lambda c: 0.7).scale == 0
    assert fit_scale(lambda c: 0.7 - (5e-7 if c > 0 else 0)).scale == 0
    assert fit_scale(lambda c: 0.7 + c).scale == 0
    assert fit_scale(lambda c: 0.7 - (5e-5 if c > 0 else 0)).scale > 0


def test_a_scale_is_never_worse_than_the_mean_and_stays_in_range():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        a, b, c = torch.randn(3, generator=generator).tolist()
        seen = []
        found = fit_scale(lambda w, a=a, b=b, c=c, seen=seen: seen.append(w) or a * math.sin(b * w) + c * w)
        assert found.nll <= found.nll_of_mean == 0
        assert all(w == 0 or SMALLEST * 0.999 <= w <= LARGEST * 1.001 for w in seen)
        assert len(seen) < 40


def test_scales_without_a_finite_nll_are_skipped():
    assert fit_scale(lambda c: math.nan if c > 2 else (c - 1) ** 2).scale == pytest.approx(1, rel=0.02)
    with pytest.raises(NonFiniteError, match="NLL of the posterior mean is nan on the validation data"):
        fit_scale(lambda c: math.nan)


def test_the_best_scale_may_border_on_scales_without_a_finite_nll():
    fitted = fit_scale(lambda c: 3.0 - c if c <= 1.1 else math.nan)
    assert fitted.scale == pytest.approx(1.1, rel=0.02)


# -- the likelihood ---------------------------------------------------------------------------------------------------


def test_class_nll_is_that_of_the_averaged_probability(generator):
    outputs, targets = torch.randn(5, 7, 3, generator=generator), torch.randint(3, (7,), generator=generator)
    expected = nn.functional.nll_loss(combine(outputs, "softmax"), targets)
    assert predictive_nll(outputs, targets, "softmax") == pytest.approx(expected.item(), rel=1e-6)
    pixels, labels = torch.randn(5, 2, 3, 4, 4, generator=generator), torch.randint(3, (2, 4, 4), generator=generator)
    expected = nn.functional.nll_loss(combine(pixels, "softmax"), labels)
    assert predictive_nll(pixels, labels, "softmax") == pytest.approx(expected.item(), rel=1e-6)


def test_binary_nll_is_that_of_the_averaged_probability(generator):
    outputs, targets = torch.randn(5, 7, 1, generator=generator), torch.randint(2, (7,), generator=generator)
    expected = nn.functional.binary_cross_entropy_with_logits(combine(outputs, "sigmoid")[:, 0], targets.float())
    assert predictive_nll(outputs, targets, "sigmoid") == pytest.approx(expected.item(), rel=1e-5)


def test_regression_nll_is_that_of_the_mixture_in_blocks_and_over_processes(generator, monkeypatch):
    outputs, targets = torch.randn(5, 9, 1, generator=generator), torch.randn(9, generator=generator)
    mixture = Normal(outputs[..., 0].double(), 0.3).log_prob(targets.double()).exp().mean(0)
    expected = -mixture.log().mean().item()
    assert predictive_nll(outputs, targets, "identity", 0.3) == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr("lightning_bayes.predictive.densities._BLOCK", 10)
    assert predictive_nll(outputs, targets, "identity", 0.3) == pytest.approx(expected, rel=1e-9)
    # a process with the first four of the rows: the other's part of every sum is added
    parts = [predictive_nll(outputs[:, rows], targets[rows], "identity", 0.3) for rows in (slice(4), slice(4, 9))]
    others = iter([torch.tensor(5.0), torch.tensor(5 * parts[1])])
    found = predictive_nll(outputs[:, :4], targets[:4], "identity", 0.3, lambda total: total + next(others))
    assert found == pytest.approx(expected, rel=1e-6)


def test_unspecified_noise_minimises_the_nll(generator):
    outputs, targets = 0.4 * torch.randn(20, 200, generator=generator), torch.randn(200, generator=generator)
    found = fit_noise_std(outputs, targets)
    at = [predictive_nll(outputs, targets, "identity", std) for std in (found / 1.02, found, found * 1.02)]
    assert at[1] == min(at)
    assert predictive_nll(outputs, targets, "identity") == pytest.approx(at[1], rel=1e-9)
    alone = fit_noise_std(outputs[:1] * 0, targets)  # one sample: the maximum of the likelihood
    assert alone == pytest.approx(targets.square().mean().sqrt().item(), rel=1e-3)


@pytest.mark.parametrize("std", [0.0, -0.3, math.inf, math.nan])
def test_a_noise_that_is_not_positive_and_finite_is_refused(std):
    message = rf"noise_std={std} must be positive and finite\. Pass .* in the units of the targets, or None to fit it"
    with pytest.raises(HyperparameterError, match=message):
        predictive_nll(torch.zeros(2, 4, 3), torch.zeros(4, 3), "identity", std)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_no_noise_fits_residuals_that_are_not_finite(bad):
    outputs = torch.zeros(2, 4, 3)
    outputs[0, 0, 0] = bad
    assert math.isnan(fit_noise_std(outputs, torch.zeros(4, 3)))
    assert math.isnan(predictive_nll(outputs, torch.zeros(4, 3), "identity"))


def test_targets_of_the_wrong_shape_are_refused():
    with pytest.raises(ShapeError, match=r"outputs are \[2, 4, 3\], with the samples first, and targets \[4\]"):
        predictive_nll(torch.zeros(2, 4, 3), torch.zeros(4), "identity")
    with pytest.raises(ShapeError, match=r"got \[2, 4, 3\] and \[5\]"):
        predictive_nll(torch.zeros(2, 4, 3), torch.zeros(5, dtype=torch.long), "softmax")
    with pytest.raises(ShapeError, match="at least one target"):
        predictive_nll(torch.zeros(2, 0, 3), torch.zeros(0, dtype=torch.long), "softmax")


# -- a known posterior ----------------------------------------------------------------------------------------

WEIGHTS, NOISE, REPEATS = 20, 0.5, 12


def fitted_scale(factor, seed, linearized):
    """Bayesian linear regression: the scale fitted to an exact posterior whose scale was multiplied by `factor`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    truth = normal(WEIGHTS)  # from the prior N(0, 1)
    x, held_out = math.sqrt(30) * torch.linalg.qr(normal(30, WEIGHTS)).Q, normal(1000, WEIGHTS)  # xᵀx = 30 I
    y, targets = (each @ truth + NOISE * normal(len(each)) for each in (x, held_out))
    precision = x.T @ x / NOISE**2 + torch.eye(WEIGHTS, dtype=F64)
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2)
    model = nn.Linear(WEIGHTS, 1, bias=False, dtype=F64)
    wrong = FullGaussian({"weight": mean[None]}, precision / factor**2, {"weight": 1.0}, 30)

    drawn, at_mean = (
        mc_predict(model, ScaledPosterior(wrong, c), held_out, 60, link="identity", linearized=linearized).samples
        for c in (1.0, 0.0)
    )
    # The model is linear, so its outputs are linear in the scale.
    return fit_scale(lambda c: predictive_nll(at_mean + c * (drawn - at_mean), targets, "identity", NOISE))


@pytest.mark.parametrize(("factor", "linearized"), [(1.0, False), (0.2, False), (6.0, True)])
def test_the_scale_of_a_misscaled_exact_posterior_is_recovered(factor, linearized):
    """The posterior is isotropic, so (c · factor)² = χ²_D / D: its ln has the mean -1/D and the variance 2/D."""
    found = [fitted_scale(factor, seed, linearized) for seed in range(REPEATS)]
    logs = torch.tensor([math.log(each.scale * factor) for each in found])
    error = 1 / math.sqrt(2 * WEIGHTS * REPEATS)
    assert abs(logs.mean() + 1 / (2 * WEIGHTS)) < 4 * error
    assert 0.5 < logs.std() * math.sqrt(2 * WEIGHTS) < 2
    assert all(each.nll < each.nll_of_mean for each in found)
