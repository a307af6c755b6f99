"""Masked weights and their products, beside torch.nn.utils.prune."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from lightning_bayes.callbacks.trainer.masks import multiplied, renamed, split
from lightning_bayes.posteriors import MeanField


def pruned():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    prune.l1_unstructured(net[0], "weight", 0.5)
    return net


def test_products_are_those_that_prune_makes_permanent():
    net = pruned()
    found = multiplied(net.state_dict())
    prune.remove(net[0], "weight")
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())


def test_split_products_are_the_same_network():
    net, x = pruned(), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    before = net(x)
    net.load_state_dict(split(multiplied(net.state_dict()), net.state_dict()))
    assert torch.equal(net(x), before)


def test_other_tensors_are_left_alone():
    values = {"attn_mask": torch.ones(2), "weight": torch.ones(3)}
    assert multiplied(values) == values == split(values, values)


def test_a_posterior_takes_the_names_of_the_module():
    ones, priors = {"0.weight": torch.ones(3), "1.bias": torch.ones(2)}, {"0.weight": 1.0, "1.bias": 1.0}
    found = renamed(MeanField(ones, ones, priors, 10.0), ["0.weight_orig", "0.weight_mask", "1.bias"])
    assert [*found.mean] == [*found.precision] == [*found.prior_precision] == ["0.weight_orig", "1.bias"]
    assert [*renamed(found, ["0.weight", "1.bias"]).mean] == ["0.weight", "1.bias"]
