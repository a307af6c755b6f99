"""Rounds of active learning on a tiny set, the report's verdicts, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.papers import active_learning as command
from benchmarks.papers.active_learning import LEARNED, NUM_TEST, NUM_TRAIN, SETTING, Trials, errors, promises, table
from lightning_bayes.zoo.data.uci import read_uci

TINY = replace(SETTING, epochs=3, mc_samples=(1, 1), eval_samples=8)


def test_rows_are_labelled_tested_or_in_the_pool(root):
    trials = Trials.draw(read_uci(root, "yacht"), 3)
    assert torch.equal(trials.labelled[:3], trials.labelled[3:])  # both learners start alike
    for labelled in range(3):
        assert trials.labelled.shape == (6, NUM_TRAIN + labelled)
        assert trials.test.shape == (6, NUM_TEST)
        rows = torch.cat([trials.labelled, trials.test, trials.pool], 1).sort(1).values
        assert torch.equal(rows, torch.arange(130).expand(6, 130))
        variances = torch.rand(6, trials.pool.shape[1], generator=torch.Generator().manual_seed(labelled))
        expected = trials.pool.gather(1, variances.argmax(1, keepdim=True))[:3, 0]
        trials.label(variances)
        assert torch.equal(trials.labelled[:3, -1], expected)


@pytest.mark.parametrize("method", LEARNED)
def test_every_fit_is_tested_and_labels_the_row_of_largest_variance(method, root, monkeypatch):
    seen = []
    monkeypatch.setattr(Trials, "label", lambda self, variances: seen.append(variances))
    found = errors(method, Trials.draw(read_uci(root, "yacht"), 2), TINY, fits=2)
    assert found.shape == (2, 4)
    assert found.isfinite().all()
    assert [each.shape for each in seen] == [(4, 130 - NUM_TRAIN - NUM_TEST)]
    assert seen[0].min() > 0


def row(name, method, active, random):
    rmse = [[9.0] * 4, [active - 0.1, active + 0.1, random - 0.1, random + 0.1]]
    return {"set": name, "method": method, "rmse": rmse}


def test_promises_look_at_pairs_of_the_last_fit():
    rows = [row("boston", "noisy_kfac", 5.0, 6.0), row("boston", "noisy_adam_fisher", 4.0, 6.0)]
    lines = list(promises(rows))
    assert lines[0] == "kept: Noisy K-FAC, active below random on 1 of 1 sets (boston)"
    assert lines[1] == "BROKEN: active, Noisy K-FAC at most Noisy Adam on 0 of 1 sets (none)"
    assert lines[2].startswith("boston, Noisy K-FAC against the paper, in standard errors: random +0.8, active -1.3")
    assert "| 6.000 ± 0.100 | 5.000 ± 0.100 | -1.000 ± 0.000 | 5.831, 5.220 |" in table(rows)


def test_a_run_keeps_its_results_and_does_not_repeat_them(root, tmp_path, monkeypatch, capsys):
    result = tmp_path / "result.json"
    arguments = ["--sets", "yacht", "--trials", "2", "--epochs", "2", "--fits", "2", "--samples", "4", "--json"]
    command.main(["--root", str(root), *arguments, str(result)])
    kept = json.loads(result.read_text("utf-8"))
    assert [each["method"] for each in kept["results"]] == list(LEARNED)
    monkeypatch.setattr(command, "errors", None)
    command.main(["--root", str(root), *arguments, str(result)])
    assert "Noisy K-FAC" in capsys.readouterr().out
