"""The character model on a small text: every method trains, the report judges, the command resumes."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.papers import war_and_peace as command
from benchmarks.papers.war_and_peace import METHODS, PROMPT, START, Setting, promises, run, table

TEXT = (PROMPT + "said that all happy families are alike. ") * 60


@pytest.fixture
def path(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return str(tmp_path / "text.txt")


def tiny(path, epochs=1):
    return Setting(path, epochs=epochs, hidden=16, samples=2, checks=1, val_batches=1, written=4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method, path):
    row, written = run(method, 0, tiny(path))
    assert math.isfinite(row["nats"])
    assert row["bits"] == pytest.approx(row["nats"] / math.log(2), rel=1e-5)
    assert len(row["curve"]) == 1
    assert (written is None) == (METHODS[method].callback is None)


def test_vadam_learns_the_text(path):
    """Below log V after 25 updates or so."""
    row, written = run("vadam", 0, tiny(path, epochs=25))
    assert row["nats"] < math.log(len(set(TEXT)))
    assert len(written.text) == 4


def test_the_first_noise_of_vadagrad_is_the_printed_one():
    group = METHODS["vadagrad"].callback(10_000, 2).group_defaults
    assert group["init_precision"] == START * 10_000
    assert group["betas"] == (0.0, 0.5)


def row(method, nats, ece=0.01, seed=0):
    shared = {"nats_at_mean": nats, "bits": 0.0, "perplexity": 0.0, "seconds": 1.0, "curve": [(1, nats)]}
    return {"method": method, "seed": seed, "nats": nats, "ece": ece, **shared}


def test_promises_and_table():
    rows = [row("adam", 1.6), row("adam", 1.78, seed=1), row("vadam", 1.73, ece=0.02)]
    rows += [row("sgd", 2.0), row("vadagrad", 3.0)]
    assert list(promises(rows, 1)) == [
        "kept: Adam 1.690 ≤ 1.70 nats after 1 epochs",
        "kept: Vadam is +0.040 nats from Adam, at most +0.05",
        "BROKEN: ECE of Vadam 0.0200 ≤ 0.0100 of Adam",
        "VadaGrad as printed is +1.000 nats from SGD (the paper: equal)",
    ]
    assert "| Adam, 2.5e-3 | 2 | 1.690 (1.600–1.780) |" in table(rows)


def test_a_run_keeps_its_results_and_does_not_repeat_them(path, tmp_path, monkeypatch, capsys):
    result = tmp_path / "result.json"
    arguments = ["--methods", "vadam", "--seeds", "1", "--epochs", "1", "--hidden", "8", "--written", "4", "--json"]
    command.main(["--path", path, *arguments, str(result)])
    assert json.loads(result.read_text("utf-8"))["setting"]["path"] == "text.txt"  # no folder of this machine
    monkeypatch.setattr(command, "run", None)
    command.main(["--path", path, *arguments, str(result)])
    assert "Vadam callback" in capsys.readouterr().out
