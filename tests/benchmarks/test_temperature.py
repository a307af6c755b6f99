"""The rules for a temperature on a grid against the package's search, and the table of a user's first classifier."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.defaults.hour import SCORES, Sets, scored
from benchmarks.defaults.pools import FRESH, Pool
from benchmarks.defaults.study import run_study, study_parser
from benchmarks.defaults.temperature import LOG_C, LOG_T, chosen, losses_of, over_threshold, records, table, verdicts
from benchmarks.over_seeds import paired_table
from lightning_bayes.predictive import choose_calibration
from lightning_bayes.predictive.calibration import WIDTH_SHRINKAGE
from lightning_bayes.predictive.temperature import SHRINKAGE


def pool(generator, rows=400, factor=2.0):
    """Logits of three classes, too large by a factor, whose spread grows with the width."""
    mean, noise = torch.randn(1, rows, 3, generator=generator), 0.3 * torch.randn(4, rows, 3, generator=generator)
    targets = torch.distributions.Categorical(logits=mean[0]).probs.multinomial(1, generator=generator)[:, 0]
    return Pool(lambda scale: factor * (mean + scale * noise), targets)


@pytest.mark.parametrize("width", [False, True])
def test_the_grid_finds_what_the_package_chooses(width, generator):
    held_out = pool(generator)
    losses = losses_of(held_out, is_wide=True)(torch.arange(400))
    row, column = chosen(losses, SHRINKAGE, WIDTH_SHRINKAGE if width else 0)
    found = choose_calibration(held_out.outputs_at, held_out.targets, "softmax", width=width)
    assert float(LOG_C[row].exp()) == pytest.approx(found.scale, rel=0.01)
    assert float(LOG_T[column]) == pytest.approx(math.log(found.temperature), abs=0.03)


def test_few_wrong_predictions_pass_no_threshold(generator):
    held_out = pool(generator)
    losses = losses_of(held_out, is_wide=False)(torch.arange(400))
    assert over_threshold(losses, wrong=10) == chosen(losses, math.inf, 0)
    assert LOG_T[over_threshold(losses, wrong=9)[1]] == pytest.approx(0, abs=1e-6)


def test_a_regression_has_a_width_and_no_temperature(generator):
    x = torch.randn(400, 1, generator=generator)
    noise = torch.randn(8, 400, 1, generator=generator)
    held_out = Pool(lambda scale: x + scale * noise, x + 0.1 * torch.randn(400, 1, generator=generator))
    (few, *_) = records(held_out, is_wide=True)
    assert few["examples"] == 34
    assert few["c 1"] < 0
    assert "T .2" not in few


def test_a_rise_by_more_than_a_standard_error_is_listed(generator):
    rows = [
        {"problem": "svhn", "method": method, "seed": seed, **found}
        for method in ("user", "vogn")
        for seed in (0, 1)
        for found in records(pool(generator), is_wide=method == "vogn")
    ]
    assert table(rows).count("| svhn |") == 4
    assert "T .2" in verdicts(rows)
    for row in rows:
        row["T .3"] = 0.1 + 0.001 * row["seed"]
    assert "raised in 4 of 4" in next(line for line in verdicts(rows).splitlines() if line.startswith("T .3"))


def test_the_noise_of_labels_is_a_fifth(monkeypatch):
    from benchmarks.defaults import pools

    labels = torch.arange(5000) % 10
    _, y, _ = pools._noisy(lambda root, seed: (torch.zeros(5000, 1), labels, 2000))(None, 0)
    assert abs(float((y != labels).double().mean()) - 0.18) < 4 * math.sqrt(0.18 * 0.82 / 5000)
    assert FRESH.keys() >= {"quality", "mnist-noisy", "svhn", "concrete"}


def test_the_hours_table_has_a_row_for_each_method(generator, monkeypatch):
    monkeypatch.setattr("benchmarks.defaults.hour.EPOCHS", 1)
    data = Sets(
        *(TensorDataset(torch.randn(40, 3, 32, 32, generator=generator), torch.arange(40) % 10) for _ in "1234")
    )
    rows = [
        {"method": method, "seed": 0, **found}
        for method in ("adamw", "VOGNCallback()")
        for found in scored(data, method, 0)
    ]
    lines = paired_table(rows, SCORES, "adamw, T", ("NLL",)).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["adamw", "adamw, T", "VOGNCallback()"]
    assert lines[3].split("|")[-2].strip() == "+0.0000"


def test_a_study_runs_what_its_file_lacks(tmp_path):
    calls = []

    def run(root, method, seed):
        calls.append((method, seed))
        yield {"score": 1.0}
        yield {"method": f"{method}, T", "score": 2.0}

    parser = study_parser("A study.", first_seed=3, seeds=1, methods=("a", "b"))
    for arguments in (["--methods", "a"], [], ["--seeds", "2", "--table"]):
        options = parser.parse_args([f"--json={tmp_path / 'study.json'}", *arguments])
        rows = run_study(options, ("methods",), run)
    assert calls == [("a", 3), ("b", 3)]
    assert [(row["method"], row["seed"], row["score"]) for row in rows[:2]] == [("a", 3, 1.0), ("a, T", 3, 2.0)]
