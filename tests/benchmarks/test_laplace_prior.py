"""The benchmark of Laplace priors on two blobs: every method is scored, kept, and set beside the temperature."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.defaults.problems import Data, Problem
from benchmarks.laplace import prior
from lightning_bayes.zoo import MLP


def blobs(root, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(60) % 2
    x = torch.randn(60, 3, generator=generator) + y[:, None]
    return Data(x[:40], y[:40], x[40:], y[40:], 3 * torch.randn(20, 3, generator=generator))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    problem = Problem(blobs, lambda data: MLP(3, 2, hidden=(4,)), batch=8, epochs=60)
    monkeypatch.setattr(prior, "PROBLEMS", {"tiny": problem})


@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge:UserWarning")
def test_every_method_is_scored_and_a_finished_run_is_kept(tmp_path, capsys):
    arguments = ["--root", "-", "--problems", "tiny", "--first-seed", "3", "--json", str(tmp_path / "r.json")]
    prior.main([*arguments, "--seeds", "1"])
    first = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    priors = ("marglik", "validation")
    assert [row["method"] for row in first] == [
        *("mean", "temperature"),
        *(f"{subset}, {each}" for subset in ("last_layer", "all") for each in priors),
    ]
    errors = {row["error"] for row in first if row["method"] in {"mean", "temperature"}}
    assert len(errors) == 1  # a temperature does not change the class
    prior.main([*arguments, "--seeds", "2"])
    second = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    assert second[:6] == first
    assert {row["seed"] for row in second} == {3, 4}
    assert "| tiny | mean |" in capsys.readouterr().out


def test_the_table_has_paired_differences_to_the_temperature():
    scores = {"error": 0.1, "calibration": 0.2, "entropy_auroc": 0.5, "problem": "tiny"}
    rows = [
        {**scores, "method": method, "seed": seed, "nll": value}
        for method, values in {"temperature": (0.5, 0.7), "mean": (0.6, 1.0)}.items()
        for seed, value in enumerate(values)
    ]
    line = next(line for line in prior.table(rows).splitlines() if "| mean |" in line)
    assert "| 0.8000 ± 0.2000 |" in line
    assert line.endswith("| +0.2000 ± 0.1000 | 2 |")  # of .1 and .3
