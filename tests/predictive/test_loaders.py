"""Predictions of a whole loader against those of its batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bayes.errors import DataError, HyperparameterError
from lightning_bayes.posteriors import MeanField
from lightning_bayes.predictive import mc_predict, predict_loader


@pytest.fixture
def fitted(generator):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    mean = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    ones = {name: torch.ones_like(value) for name, value in mean.items()}
    return model, MeanField(mean, ones, dict.fromkeys(mean, 1.0), num_data=1)


def test_a_loader_is_predicted_like_its_batches(fitted, generator):
    x = torch.randn(7, 3, generator=generator)
    loader = [(x[:4], torch.zeros(4)), (x[4:], torch.zeros(3))]
    torch.testing.assert_close(
        predict_loader(*fitted, loader, 5, seed=2), mc_predict(*fitted, x, 5, seed=2).sample_probs
    )
    values = mc_predict(*fitted, x, 5, link="identity").samples
    torch.testing.assert_close(predict_loader(*fitted, [x[:4], x[4:]], 5, link="identity"), values)
    ones = mc_predict(*fitted, x, 5, link="sigmoid", linearized=True).sample_probs
    torch.testing.assert_close(predict_loader(*fitted, [x], 5, link="sigmoid", linearized=True), ones)


def test_an_empty_loader_is_refused(fitted):
    with pytest.raises(DataError, match="no batch"):
        predict_loader(*fitted, [])
    with pytest.raises(HyperparameterError, match="samples=0"):
        predict_loader(*fitted, [torch.ones(1, 3)], 0)
