"""Active learning on images: every method for two rounds of random pictures, what is kept, and the table by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.papers.active_learning import images
from benchmarks.papers.active_learning.images import METHODS, Setting, main, run, table

TINY = Setting(pool=16, tested=8, size=3, rounds=2, epochs=1)
ASKED = ["--root", "-", "--pool=16", "--tested=8", "--size=3", "--rounds=2", "--epochs=1", "--seeds=1"]


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 1, 28, 28, generator=generator), torch.arange(count) % 10)


@pytest.fixture
def data():
    return pictures(TINY.pool, 0), pictures(TINY.tested, 1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_labels_and_is_tested_after_each_fit(method, data, monkeypatch):
    seen, fit = [], images.fit
    monkeypatch.setattr(images, "fit", lambda pool, *more: (seen.append(list(pool.labelled)), fit(pool, *more))[1])
    row = run(method, 0, data, TINY)
    assert [len(set(labelled)) for labelled in seen] == [3, 6]
    assert set(seen[0]) < set(seen[1])
    assert all(8 * value == pytest.approx(round(8 * value)) for value in row["accuracy"])
    assert len(row["nll"]) == 2


def test_all_methods_of_a_seed_begin_alike(data):
    first = [run(method, 1, data, TINY) for method in ("random", "bald")]
    assert first[0]["nll"][0] == first[1]["nll"][0]


def test_results_are_kept_and_not_repeated(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(images, "read", lambda root, setting: data)
    arguments = [*ASKED, "--json", str(tmp_path / "r.json"), "--figure", str(tmp_path / "r.png")]
    main([*arguments, "--methods", "random"])
    first = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    main([*arguments, "--methods", "random", "entropy"])
    second = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    assert second[0] == first[0]
    assert [row["method"] for row in second] == ["random", "entropy"]
    assert (tmp_path / "r.png").stat().st_size > 5000
    with pytest.raises(SystemExit):
        main([*arguments, "--epochs=2"])
    assert "has runs with" in capsys.readouterr().err


def test_the_table_has_paired_differences_to_random():
    rows = [
        {"method": "random", "seed": 0, "accuracy": [0.5, 0.6], "nll": [1.0, 2.0]},
        {"method": "random", "seed": 1, "accuracy": [0.7, 0.8], "nll": [1.0, 2.0]},
        {"method": "bald", "seed": 0, "accuracy": [0.5, 0.8], "nll": [1.0, 4.0]},
        {"method": "bald", "seed": 1, "accuracy": [0.8, 1.0], "nll": [1.0, 4.0]},
    ]
    line = next(line for line in table(rows, 20).splitlines() if line.startswith("| BALD"))
    # .65 and .9 beside .55 and .75: differences .1 and .15; at the end .2 and .2
    assert line == (
        "| BALD | 0.7750 ± 0.1250 | +0.1250 ± 0.0250 | 2.5000 ± 0.0000 | 0.9000 ± 0.1000 | +0.2000 ± 0.0000 | 2 |"
    )
    assert "40 labels" in table(rows, 20)
