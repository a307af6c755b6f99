"""The comparison of Noisy K-FAC's engines: its table, and one run from end to end."""

from __future__ import annotations

from benchmarks.defaults.problems import PROBLEMS
from benchmarks.engines.__main__ import SOURCES, run, table


def rows(*of_source):
    named = zip(SOURCES, of_source, strict=False)
    return [
        {"set": "digits", "step": "default", "source": name, "runs": [{"error": e, "nll": n} for e, n in runs]}
        for name, runs in named
    ]


def test_differences_are_paired_by_seed():
    ours = [(0.25, 1.0), (0.5, 2.0), (0.75, 3.0)]
    theirs = [(0.375, 1.5), (0.625, 2.5), (0.875, 3.5)]  # a difference that all seeds share
    mixed = [(0.375, 1.125), (0.375, 1.875), (0.75, 3.0)]
    lines = table(rows(ours, theirs, mixed)).splitlines()
    assert lines[2] == "| digits | default | fused | 0.5000 | 2.0000 |  |  |  |"
    assert lines[3].endswith("| +0.1250 ± 0.0000 | +0.5000 ± 0.0000 | no, no |")
    assert lines[4].endswith("| +0.0000 ± 0.0722 | +0.0000 ± 0.0722 | yes, yes |")


def test_one_seed_has_no_standard_error():
    assert table(rows([(0.25, 1.0)], [(0.375, 1.5)])).endswith("| +0.1250 | +0.5000 | –, – |")


def test_both_engines_run(tmp_path):
    data = PROBLEMS["digits"].load(tmp_path, 0)
    few = data._replace(
        train_x=data.train_x[:64], train_y=data.train_y[:64], test_x=data.test_x[:50], test_y=data.test_y[:50]
    )
    for source in ("fused", "backpack kfac"):
        found = run("digits", few, source, "default", seed=0, epochs=1)
        assert 0 <= found["error"] <= 1
        assert found["nll"] > 0
