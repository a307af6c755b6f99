"""The benchmark beside laplace-torch: its table, one cost without the peer, and the agreement where there is a peer."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.laplace.__main__ import table
from benchmarks.laplace.agreement import agreements
from benchmarks.laplace.cost import approximate, network


def test_the_table_shows_differences_costs_and_failures():
    line = {"network": "MLP", "subset": "all", "structure": "full", "backend": "CurvlinopsGGN"}
    found = table(
        {
            "agreement": [
                {**line, "precision": 1e-16, "evidence": 0.0, "probit": 2e-16},
                {**line, "peer": "Error: no"},
            ],
            "cost": [
                {"setting": ["lenet5", "all", "full", 5, 10], "package": "p", "cpu_seconds": 1.23, "peak_mib": 4.5},
                {"setting": ["lenet5", "all", "full", 5, 10], "package": "q", "error": "no", "cpu_seconds": 1.0},
            ],
        }
    ).splitlines()
    assert found[2] == "| MLP | all | full | CurvlinopsGGN | 1e-16 | 0e+00 | 2e-16 |"
    assert "| Error: no |  |  |" in found[3]
    assert found[-2:] == [
        "| lenet5 | all | full | 5 | 10 | p | 1.2 | 4 |",
        "| lenet5 | all | full | 5 | 10 | q | — | no |",
    ]


def test_this_package_is_measured_without_the_other():
    model, shape = network("lenet5")
    data = TensorDataset(torch.randn(6, *shape), torch.arange(6))
    evidence = approximate("lightning-bayes", model, DataLoader(data, batch_size=3), "last_layer", "kronecker")
    assert evidence < 0


def test_both_packages_agree():
    curvature = pytest.importorskip("laplace.curvature")
    for line in agreements([curvature.CurvlinopsGGN]):
        assert max(line["precision"], line["evidence"], line["probit"]) < 1e-4, line
