"""docs/regression.md shows what the commands print of the kept results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.papers.predictive_variance import report as variances
from benchmarks.papers.uci.__main__ import read
from benchmarks.papers.uci.report import markdown, promises
from benchmarks.papers.uci.show import longest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
TEXT = (ROOT / "docs/regression.md").read_text("utf-8")


def test_the_tables_of_the_standard_splits():
    rows = longest(read(RESULTS / "uci.json"))
    assert markdown(rows) in TEXT, "insert what python -m benchmarks.papers.uci.show prints with --markdown"
    assert "\n".join(f"- {line}" for line in promises(rows)) in TEXT


def test_the_correlations_with_nuts():
    rows = json.loads((RESULTS / "predictive_variance.json").read_text("utf-8"))["results"]
    assert variances.table(rows) in TEXT, "insert what python -m benchmarks.papers.predictive_variance prints"
    assert "\n".join(f"- {line}" for line in variances.promises(rows)) in TEXT


def test_the_precision_matrices():
    for name, found in json.loads((RESULTS / "precision_matrices.json").read_text("utf-8"))["results"].items():
        assert f"| {name} | {found['log_likelihood']:.3f} | {found['distance']:.3f} |" in TEXT
