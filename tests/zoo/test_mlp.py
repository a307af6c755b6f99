from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.models import MLP


def test_without_hidden_layers_is_linear():
    torch.manual_seed(0)
    net = MLP(6, 2, hidden=())
    weight, bias = net.parameters()
    inputs = torch.randn(4, 2, 3)
    torch.testing.assert_close(net(inputs), inputs.reshape(4, 6) @ weight.T + bias)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("tanh", torch.tanh),
        ("sigmoid", lambda x: 1 / (1 + torch.exp(-x))),
        ("gelu", lambda x: x * torch.distributions.Normal(0, 1).cdf(x)),
    ],
)
def test_applies_the_activation_after_each_hidden_layer_only(name, function):
    torch.manual_seed(0)
    net = MLP(3, 2, hidden=(5, 4), activation=name)
    w1, b1, w2, b2, w3, b3 = net.parameters()
    inputs = torch.randn(7, 3)
    expected = function(function(inputs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
    torch.testing.assert_close(net(inputs), expected)


def test_default_is_the_uci_network_of_one_layer_of_50():
    assert [tuple(p.shape) for p in MLP(13, 1).parameters()] == [(50, 13), (50,), (1, 50), (1,)]


@pytest.mark.parametrize("widths", [{"in_features": 0}, {"out_features": 0}, {"hidden": (5, -1)}])
def test_a_width_below_one_is_rejected(widths):
    with pytest.raises(HyperparameterError, match=r"layer widths \[.*(0|-1).*\]; each must be at least 1"):
        MLP(**{"in_features": 3, "out_features": 2, **widths})


def test_an_unknown_activation_is_rejected():
    with pytest.raises(HyperparameterError, match="activation='swish'; choose one of relu, tanh, sigmoid, gelu"):
        MLP(3, 2, activation="swish")
