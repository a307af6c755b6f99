"""Dropout that drops nothing is not dropout: public models are built with p=0 by default."""

from __future__ import annotations

import warnings

import pytest
from tiny_training import Classifier, fit
from torch import nn
from torchvision.ops import StochasticDepth

from lightning_bayes import MCDropoutCallback
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.predictive import dropout_layers


class DropPath(nn.Module):
    """timm's layer, by its name and attribute."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob


ACTIVE = [
    nn.Dropout(0.5),
    nn.Dropout2d(0.5),
    nn.AlphaDropout(0.5),
    DropPath(0.5),
    StochasticDepth(0.5, "row"),
    nn.LSTM(2, 2, num_layers=2, dropout=0.5),
    nn.MultiheadAttention(2, 1, dropout=0.5),
    nn.TransformerEncoderLayer(2, 1, 4, dropout=0.5),
]
INACTIVE = [
    nn.Dropout(0.0),
    DropPath(0.0),
    DropPath(None),
    StochasticDepth(0.0, "row"),
    nn.LSTM(2, 2, num_layers=2),
    nn.MultiheadAttention(2, 1),
    nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0),
    nn.Linear(2, 2),
]


@pytest.mark.parametrize("layer", ACTIVE, ids=lambda layer: type(layer).__name__)
def test_a_layer_that_drops_is_found(layer):
    assert layer in dropout_layers(nn.Sequential(layer))


@pytest.mark.parametrize("layer", INACTIVE, ids=lambda layer: type(layer).__name__)
def test_a_layer_that_drops_nothing_is_not(layer):
    assert dropout_layers(nn.Sequential(layer)) == []


def single_recurrent_layer():
    with warnings.catch_warnings():  # torch: dropout acts between layers
        warnings.simplefilter("ignore")
        return nn.LSTM(2, 2, dropout=0.5)


def test_the_dropout_of_one_recurrent_layer_drops_nothing():
    assert dropout_layers(nn.Sequential(single_recurrent_layer())) == []


def test_inserted_dropout_of_zero_is_refused():
    with pytest.raises(HyperparameterError, match=r"p=0\.0 must be above 0, or all passes would be the same"):
        MCDropoutCallback(p=0.0, layers="net")


def test_a_network_with_inactive_dropout_alone_is_refused_before_training():
    module = Classifier(net=nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)))
    with pytest.raises(UnsupportedLayerError, match=r"only dropout layers that drop nothing \(net\.\d\)"):
        fit(module, MCDropoutCallback())
