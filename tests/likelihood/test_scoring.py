"""The NLL of averaged predictions, against torch.distributions and torch's losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from lightning_bayes.errors import ShapeError
from lightning_bayes.likelihood import Gaussian, find_kind
from lightning_bayes.likelihood.scoring import fit_noise_std
from lightning_bayes.predictive import predictive_nll


def test_class_nll_is_that_of_the_averaged_probability(generator):
    outputs, targets = torch.randn(5, 7, 3, generator=generator), torch.randint(3, (7,), generator=generator)
    expected = nn.functional.nll_loss(find_kind("softmax").combine(outputs), targets)
    assert predictive_nll(outputs, targets, "softmax") == pytest.approx(expected.item(), rel=1e-6)
    pixels, labels = torch.randn(5, 2, 3, 4, 4, generator=generator), torch.randint(3, (2, 4, 4), generator=generator)
    expected = nn.functional.nll_loss(find_kind("softmax").combine(pixels), labels)
    assert predictive_nll(pixels, labels, "softmax") == pytest.approx(expected.item(), rel=1e-6)


def test_binary_nll_is_that_of_the_averaged_probability(generator):
    outputs, targets = torch.randn(5, 7, 1, generator=generator), torch.randint(2, (7,), generator=generator)
    expected = nn.functional.binary_cross_entropy_with_logits(
        find_kind("sigmoid").combine(outputs)[:, 0], targets.float()
    )
    assert predictive_nll(outputs, targets, "sigmoid") == pytest.approx(expected.item(), rel=1e-5)


def test_regression_nll_is_that_of_the_mixture_in_blocks_and_over_processes(generator, monkeypatch):
    outputs, targets = torch.randn(5, 9, 1, generator=generator), torch.randn(9, generator=generator)
    mixture = Normal(outputs[..., 0].double(), 0.3).log_prob(targets.double()).exp().mean(0)
    expected = -mixture.log().mean().item()
    assert predictive_nll(outputs, targets, Gaussian(0.3)) == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr("lightning_bayes.likelihood.scoring.BLOCK", 10)
    assert predictive_nll(outputs, targets, Gaussian(0.3)) == pytest.approx(expected, rel=1e-9)
    # a process with the first four of the rows: the other's part of every sum is added
    parts = [predictive_nll(outputs[:, rows], targets[rows], Gaussian(0.3)) for rows in (slice(4), slice(4, 9))]
    others = iter([torch.tensor([5 * parts[1], 5.0])])
    found = predictive_nll(outputs[:, :4], targets[:4], Gaussian(0.3), lambda total: total + next(others))
    assert found == pytest.approx(expected, rel=1e-6)


def test_unspecified_noise_minimises_the_nll(generator):
    outputs, targets = 0.4 * torch.randn(20, 200, generator=generator), torch.randn(200, generator=generator)
    found = fit_noise_std(outputs, targets)
    at = [predictive_nll(outputs, targets, Gaussian(std)) for std in (found / 1.02, found, found * 1.02)]
    assert at[1] == min(at)
    assert predictive_nll(outputs, targets, "identity") == pytest.approx(at[1], rel=1e-9)
    alone = fit_noise_std(outputs[:1] * 0, targets)  # one sample: the maximum of the likelihood
    assert alone == pytest.approx(targets.square().mean().sqrt().item(), rel=1e-3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_no_noise_fits_residuals_that_are_not_finite(bad):
    outputs = torch.zeros(2, 4, 3)
    outputs[0, 0, 0] = bad
    assert math.isnan(fit_noise_std(outputs, torch.zeros(4, 3)))
    assert math.isnan(predictive_nll(outputs, torch.zeros(4, 3), "identity"))


def test_targets_of_the_wrong_shape_are_refused():
    with pytest.raises(ShapeError, match=r"means \[8, 3\] and targets \[8\]"):
        predictive_nll(torch.zeros(2, 4, 3), torch.zeros(4), Gaussian(1.0))
    with pytest.raises(ShapeError, match=r"got \[2, 4, 3\] and \[5\]"):
        predictive_nll(torch.zeros(2, 4, 3), torch.zeros(5, dtype=torch.long), "softmax")
    with pytest.raises(ShapeError, match="at least one target"):
        predictive_nll(torch.zeros(2, 0, 3), torch.zeros(0, dtype=torch.long), "softmax")
