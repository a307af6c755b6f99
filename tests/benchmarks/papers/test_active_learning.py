"""Rounds of active learning on a tiny set, the verdicts, and a run that goes on between fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.papers import active_learning as command
from benchmarks.papers.active_learning import LEARNED, NUM_TEST, NUM_TRAIN, SETTING, Trials, promises, rounds, table
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
        trials = trials.label(variances)
        assert torch.equal(trials.labelled[:3, -1], expected)


def started(method):
    return {"set": "yacht", "method": method, "seconds": 0.0, "rmse": [], "labelled": []}


@pytest.mark.parametrize("method", LEARNED)
def test_a_run_stopped_after_a_fit_goes_on_to_the_same_errors_and_labels(method, root):
    once, twice = started(method), started(method)
    for row, stops in ((once, (3,)), (twice, (1, 3))):
        for stop in stops:
            list(rounds(row, Trials.draw(read_uci(root, "yacht"), 2), TINY, stop))
    assert torch.tensor(once["rmse"]).shape == (3, 4)
    assert torch.tensor(once["rmse"]).isfinite().all()
    assert (once["rmse"], once["labelled"]) == (twice["rmse"], twice["labelled"])


def test_the_active_learner_labels_the_row_whose_samples_spread_most(root):
    row, trials = started("bbb"), Trials.draw(read_uci(root, "yacht"), 2)
    list(rounds(row, trials, TINY, 1))
    labelled = torch.tensor(row["labelled"])
    assert labelled.shape == (4, NUM_TRAIN + 1)
    assert (labelled[:, -1:] == trials.pool).any(1).all()


def row(name, method, active, random):
    rmse = [[9.0] * 4] * 9 + [[active - 0.1, active + 0.1, random - 0.1, random + 0.1]]
    return {"set": name, "method": method, "rmse": rmse}


def test_promises_look_at_pairs_of_the_last_fit():
    rows = [row("boston", "noisy_kfac", 5.0, 6.0), row("boston", "noisy_adam_fisher", 4.0, 6.0)]
    assert list(promises(rows)) == [
        "kept: Noisy K-FAC, active below random on 1 of 1 sets (boston)",
        "BROKEN: active, Noisy K-FAC at most Noisy Adam on 0 of 1 sets (none)",
    ]
    assert "| 10 | 6.000 ± 0.100 | 5.000 ± 0.100 | -1.000 ± 0.000 | 5.831, 5.220 |" in table(rows)


def test_a_run_keeps_its_results_and_does_not_repeat_them(root, tmp_path, monkeypatch, capsys):
    result = tmp_path / "result.json"
    arguments = ["--root", str(root), "--sets", "yacht", "--trials", "2", "--epochs", "1", "--samples", "4"]
    command.main([*arguments, "--methods", "bbb", "--json", str(result)])
    (kept,) = json.loads(result.read_text("utf-8"))["results"]
    assert len(kept["rmse"]) == 10
    monkeypatch.setattr(command, "evaluate", None)
    command.main([*arguments, "--methods", "bbb", "--json", str(result)])
    assert "| yacht | BBB | 10 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*arguments, "--json", str(result), "--mc-samples", "2"])
