"""The benchmark of speed: ratios are taken within a round, and a fit is timed after its warm-up."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.speed import __main__ as command
from benchmarks.speed import fits


def test_ratios_are_taken_within_a_round():
    times = {"Adam": [1.0, 10.0, 1.0, 10.0], "VOGN": [1.2, 12.0, 1.2, 12.0]}  # busy every second round
    assert command.ratio(times, "VOGN") == pytest.approx((1.2, 1.2, 1.2))


def test_every_round_times_every_method_in_another_order():
    order = []
    times = command.interleave(["Adam", "VOGN", "IVON"], 3, lambda method: order.append(method) or float(len(order)))
    assert order == ["Adam", "VOGN", "IVON", "VOGN", "IVON", "Adam", "IVON", "Adam", "VOGN"]
    assert times["VOGN"] == [2.0, 4.0, 9.0]


def test_a_target_that_is_missed_is_said():
    times, starts = {"Adam": [1.0], "floor": [1.25], "VOGN": [1.31]}, {"VOGN": [0.5]}
    row = command.line("lenet5", "VOGN", times, starts, 32)
    assert row == "| LeNet-5 @ 32 | VOGN | 1310.00 | 1.31 | 1.31 to 1.31 | 1.05 | 500 | ≤ 1.3: MISSED |"


def test_every_method_is_timed_after_its_warm_up(monkeypatch, capsys):
    tiny = fits.Network("tiny", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), 10)
    monkeypatch.setattr(command, "NETWORKS", {"tiny": tiny})
    command.main(["--networks", "tiny", "--rounds", "1", "--batch", "2"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [method for method in fits.METHODS if method != "ivon-opt"]


@pytest.mark.parametrize("network", ["mlp256", "transformer", "embedding", "vit_tiny"])
def test_every_network_takes_its_inputs(network):
    chosen = fits.NETWORKS[network]
    assert chosen.build()(chosen.inputs(2)).shape == (2, fits.CLASSES)
