"""The benchmark beside laplace-torch: its table, and the agreement where the peer is installed."""

from __future__ import annotations

import pytest

from benchmarks.laplace.__main__ import agreements, table


def test_the_table_shows_differences_and_failures():
    line = {"network": "MLP", "subset": "all", "structure": "full", "backend": "CurvlinopsGGN"}
    found = table([{**line, "precision": 1e-16, "evidence": 0.0, "probit": 2e-16}, {**line, "peer": "Error: no"}])
    assert "| MLP | all | full | CurvlinopsGGN | 1e-16 | 0e+00 | 2e-16 |" in found
    assert "| Error: no |  |  |" in found


def test_both_packages_agree():
    curvature = pytest.importorskip("laplace.curvature")
    for line in agreements([curvature.CurvlinopsGGN]):
        assert max(line["precision"], line["evidence"], line["probit"]) < 1e-4, line
