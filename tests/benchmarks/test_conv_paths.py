"""The benchmark of the convolutions' paths: each is left out where it is used, and only there."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import conv_paths
from benchmarks.speed.conv_paths import ALL, PATHS, in_words, measure_paths, strategies_of, without_strategy
from benchmarks.speed.models import MODELS, make_task
from benchmarks.speed.setting import Setting
from lightning_bayes.curvature import measure
from lightning_bayes.curvature.rules import conv


def test_strategies_of_a_network_are_named():
    found = strategies_of(make_task(MODELS["alexnet"], 2, Setting()))
    assert set(found.values()) <= {strategy.name for strategy in conv_paths.STRATEGIES}
    assert "pairs" in found.values()


@pytest.mark.parametrize("path", PATHS)
def test_no_path_changes_what_is_measured(path):
    task = make_task(MODELS["lenet"], 3, Setting())
    truth = measure(task.model, task.loss)
    before = conv.plan
    with PATHS[path]():
        found = measure(task.model, task.loss)
    assert conv.plan is before
    for name, value in truth.curvature.items():
        torch.testing.assert_close(found.curvature[name], value)


def test_a_strategy_is_left_out():
    task = make_task(MODELS["alexnet"], 2, Setting())
    (name, _), *_ = [item for item in strategies_of(task).items() if item[1] == "pairs"]
    layer = task.model.get_submodule(name)
    shape = conv_paths.conv_shape(
        layer, torch.zeros(2, layer.in_channels, 2, 2), torch.zeros(2, layer.out_channels, 2, 2)
    )
    with without_strategy("pairs"):
        assert conv.plan(shape, torch.device("cpu")).name != "pairs"


def test_rows_are_ratios_to_all_paths():
    rows = list(measure_paths("lenet", 2, 2, "cpu", Setting()))
    assert rows[0]["path"] == ALL
    assert rows[0]["ratio"] == 1.0
    assert all("without it" in in_words(row) for row in rows)
