"""The cost model against sums by hand, and its bytes against those that two ranks reduce."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from benchmarks.cost_model import (
    Intervals,
    Machine,
    arithmetic_seconds,
    collective_seconds,
    describe,
    reduced_bytes,
    step_seconds,
)
from benchmarks.scaling import RANKS, lenet, measure, on_paper


def tiny():
    """Conv 2·3·3·3 weights, BatchNorm 2 + 2 and statistics 2 + 2, linear 8·5 + 5."""
    return nn.Sequential(nn.Conv2d(3, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 5))


@pytest.fixture
def network():
    with torch.device("meta"):
        return describe(tiny(), (3, 4, 4))


def test_a_network_is_counted_as_by_hand(network):
    assert network.parameters == 54 + 4 + 45
    assert network.buffers == 4
    assert network.sides == ((2, 27), (5, 9))
    assert network.rest == 4
    assert network.forward_flops == 2 * (4 * 54 + 40)
    assert network.factor_flops == 2 * 4 * (2**2 + 27**2) + 2 * (5**2 + 9**2)


def test_bytes_are_those_of_what_is_reduced(network):
    assert reduced_bytes(network, "adam") == 4 * 103
    assert reduced_bytes(network, "vogn") == 4 * (2 * 103 + 4 + 3)
    assert reduced_bytes(network, "noisy-kfac") == 4 * (103 + 4 + 4 + 3 + 4 + 729 + 25 + 81)
    assert reduced_bytes(network, "noisy-kfac", measures=False) == 4 * (103 + 4 + 3)


def test_layers_with_long_sides_have_no_factors():
    """ResNet-18 has three convolutions of 512 · 3 · 3 inputs."""
    with torch.device("meta"):
        network = describe(torchvision.models.resnet18(), (3, 224, 224))
    assert network.parameters == 11_689_512
    assert len(network.sides) == 21 - 3
    assert max(max(sides) for sides in network.sides) == 256 * 9


def test_a_collective_is_its_bytes_and_its_hops():
    machine = Machine(bandwidth=100.0, latency=0.5)
    assert collective_seconds(1000.0, 1, machine) == 0
    assert collective_seconds(1000.0, 2, machine) == pytest.approx(10 + 2 * 0.5)
    assert collective_seconds(1000.0, 8, machine) == pytest.approx(2 * 7 / 8 * 10 + 2 * 3 * 0.5)
    two_buckets = collective_seconds(2.0**28 + 1, 2, Machine(bandwidth=1e30, latency=0.5))
    assert two_buckets == pytest.approx(2 * 2 * 0.5)


def test_arithmetic_is_a_sum_by_hand(network):
    machine = Machine(flops=100.0, matrix_flops=10.0, batch=2, backward_over_forward=2.0)
    plain = 2 * 3 * network.forward_flops / 100
    every = Intervals(stats=4, inverse=5)
    assert arithmetic_seconds(network, "adam", 1.5, machine, every) == pytest.approx(plain)
    assert arithmetic_seconds(network, "vogn", 1.5, machine, every) == pytest.approx(1.5 * plain)
    inversions = 2 * (2**3 + 27**3 + 5**3 + 9**3) / 10
    expected = plain + 2 * network.factor_flops / 100 / 4 + inversions / 5
    assert arithmetic_seconds(network, "noisy-kfac", 1.5, machine, every) == pytest.approx(expected)


def test_efficiency_falls_with_ranks_and_is_one_alone(network):
    for method in ("vogn", "noisy-kfac"):
        rows = on_paper(network, method, 1.3, Machine(), Intervals())
        found = [row["efficiency"] for row in rows]
        assert [row["ranks"] for row in rows] == list(RANKS)
        assert found[0] == 1
        assert found == sorted(found, reverse=True)
        _, communication = step_seconds(network, method, 2, 1.3, Machine(), Intervals())
        assert rows[1]["communication"] == communication > 0


@pytest.mark.ddp
def test_two_ranks_reduce_the_bytes_of_the_model():
    """Of the last step: Noisy K-FAC measures in it."""
    with torch.device("meta"):
        network = describe(lenet(), (3, 32, 32))
    found = measure(2, 1, Intervals().stats + 1)
    assert found["bytes"]["vogn"] == reduced_bytes(network, "vogn")
    assert found["bytes"]["noisy-kfac"] == reduced_bytes(network, "noisy-kfac")
    assert found["ratios"]["adam"] == 1
