from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks.speed.models import make_task
from benchmarks.speed.profile import PHASES, main, phase_lines, profile_layer, record_calls
from benchmarks.speed.table import render


def test_records_what_each_layer_sees_in_the_model(tiny, setting):
    task = make_task(tiny, 4, setting)
    convolution, linear = record_calls(task)
    assert [c.unit.name for c in (convolution, linear)] == ["0", "3"]
    assert torch.equal(convolution.x, task.images)
    assert not convolution.x.requires_grad  # the first layer hands no gradient on, here as there
    assert linear.x.requires_grad
    expected = (F.softmax(task.model(task.images), 1) - F.one_hot(task.labels, 5)) / 4
    torch.testing.assert_close(linear.grad_output, expected)
    assert all(p.grad is None for p in task.model.parameters())
    assert not any(m._forward_hooks for m in task.model.modules())


def test_times_a_layer_alone(tiny, setting):
    times = profile_layer(record_calls(make_task(tiny, 4, setting))[1], setting, rounds=2)
    assert (times.layer, times.weight, times.output) == ("3 (Linear)", [5, 36], [4, 5])
    assert times.plain > 0
    assert times.curvature == times.measured - times.plain


def test_shares_of_the_phases_add_up():
    lines = list(phase_lines({**dict.fromkeys(PHASES, 0.2), "Adam's update": 0.1}))
    assert [line.rpartition(" ")[2] for line in lines[1:-1]] == ["16.7%"] * 6
    assert "1200.00   2.40 × Adam's step, with 1.40 for the draws alone" in lines[-1]


@pytest.mark.usefixtures("_tiny_models")
def test_prints_and_writes_phases_and_layers(tmp_path, capsys):
    path = tmp_path / "r.json"
    main(["--models", "tiny", "tiny-bn", "--batch", "4", "--rounds", "2", "--json", str(path)])
    found = json.loads(path.read_text("utf-8"))["profiles"]
    printed = capsys.readouterr().out
    for profile, layers in zip(found.values(), (2, 3), strict=True):
        assert set(profile["phases"]) == {*PHASES, "Adam's update"}
        assert [layer["layer"] in printed for layer in profile["layers"]] == [True] * layers
    assert all(printed.count(phase) >= 2 for phase in (*PHASES, "all layers"))


@pytest.mark.usefixtures("_tiny_models")
def test_the_document_gets_a_table_of_the_phases(tmp_path, capsys):
    path = tmp_path / "r.json"
    main(["--models", "tiny", "--batch", "4", "--rounds", "2", "--json", str(path)])
    result = json.loads(path.read_text("utf-8"))
    result["profiles"]["tiny"]["phases"] = {**dict.fromkeys(PHASES, 0.2), "Adam's update": 0.1}
    table = render(result)
    assert "2 interleaved rounds" in table
    assert table.endswith(" | 200.0 | 200.0 | 200.0 | 200.0 | 200.0 | 200.0 | 2.40 | 1.40 |\n")
