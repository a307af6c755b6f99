"""Figure 1's curvatures against autograd, its structures against dense algebra, and a tiny run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.papers import precision_matrices
from benchmarks.papers.precision_matrices import STRUCTURES, fisher, full, main, normalised, run

SHAPES = [(3, 3), (2, 4), (1, 3)]


@pytest.fixture
def network(generator):
    weights = [torch.rand(shape, generator=generator) for shape in SHAPES]  # positive: no unit is dead
    inputs = torch.nn.functional.pad(torch.randn(6, 2, generator=generator), (0, 1), value=1.0)
    return weights, inputs


def test_the_jacobian_equals_autograds(network):
    weights, inputs = network

    def outputs(*matrices):
        x = inputs
        for matrix in matrices[:-1]:
            x = torch.nn.functional.pad((x @ matrix.mT).relu(), (0, 1), value=1.0)
        return (x @ matrices[-1].mT)[:, 0]

    parts = torch.autograd.functional.jacobian(outputs, tuple(weights))
    torch.testing.assert_close(run(weights, inputs).jacobian(), torch.cat([part.flatten(1) for part in parts], 1))
    torch.testing.assert_close(run(weights, inputs).outputs, outputs(*weights))


def test_the_full_precision_is_the_mean_outer_product_and_the_prior(network):
    found = run(*network)
    outer = torch.stack([3.0 * torch.outer(row, row) for row in found.jacobian()]).mean(0)
    torch.testing.assert_close(full(fisher(found, 3.0), 0.1), outer + 0.1 * torch.eye(len(outer)))


def test_each_structure_has_its_own_zeros(network):
    curvature = fisher(run(*network), 3.0)
    first, second = SHAPES[0][0] * SHAPES[0][1], SHAPES[1][0] * SHAPES[1][1]
    found = {name: structure(curvature, 0.1) for name, structure in STRUCTURES.items()}
    assert torch.equal(found["diagonal"], torch.diag(full(curvature, 0.1).diagonal()))
    assert found["matrix-variate"][:first, first:].count_nonzero() == 0
    assert found["matrix-variate"][first : first + second, :first].count_nonzero() == 0
    covariance = torch.linalg.inv(found["block-tridiagonal"].double())
    assert covariance[:first, first + second :].abs().max() < 1e-4 * covariance.abs().max()
    assert covariance[:first, first : first + second].abs().max() > 1e-2 * covariance.abs().max()
    for precision in found.values():
        assert torch.linalg.eigvalsh(precision).min() > 0


def test_a_normalised_precision_has_a_unit_diagonal(network):
    shown = normalised(full(fisher(run(*network), 3.0), 0.1))
    torch.testing.assert_close(shown.diagonal(), torch.ones(len(shown)))
    assert shown.max() < 1 + 1e-5  # Cauchy and Schwarz


def test_a_tiny_run_prints_all_four_posteriors(tmp_path, monkeypatch, capsys):
    generator = np.random.default_rng(0)
    data = generator.normal(size=(40, 4))
    rows = {"train_0": np.arange(36), "test_0": np.arange(36, 40)}
    np.savez(tmp_path / "bostonHousing.npz", data=data, index_features=[0, 1, 2], index_target=3, n_splits=1, **rows)
    monkeypatch.setattr(precision_matrices, "WIDTHS", (3, 2))
    plot, result = tmp_path / "p.png", tmp_path / "p.json"
    main(["--root", str(tmp_path), "--epochs", "2", "--plot", str(plot), "--json", str(result)])
    found = json.loads(result.read_text())["results"]
    assert list(found) == list(STRUCTURES)
    assert found["full"]["distance"] == 0
    assert all(np.isfinite(scores["log_likelihood"]) for scores in found.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 4
