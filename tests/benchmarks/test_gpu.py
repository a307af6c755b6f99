"""The command for a machine with a GPU, on one without."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import gpu


@pytest.fixture
def found(tmp_path):
    def run(*arguments):
        gpu.main(["--folder", str(tmp_path), *arguments])
        return json.loads((tmp_path / "parts.json").read_text("utf-8"))

    return run


@pytest.fixture
def calls(monkeypatch):
    """What would be run; each part writes a line and ends as told."""
    made, codes = [], {}

    def run(words, *, stdout, timeout, **options):
        made.append(words[2])
        stdout.write(f"{words[2]} ran\n")
        if codes.get(words[2]) is None and words[2] in codes:
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, codes.get(words[2], 0))

    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setattr(gpu, "provenance", lambda: {"commit": "a"})
    return made, codes


def test_without_a_gpu_every_part_is_skipped_with_the_reason(found, monkeypatch):
    monkeypatch.setattr(gpu, "missing_for", lambda device: f"no {device}")
    rows = found()
    assert list(rows) == list(gpu.PARTS)
    assert {row["status"] for row in rows.values()} == {"skipped"}
    assert {row["reason"] for row in rows.values()} == {"no cuda"}


def test_finished_parts_are_not_run_again_and_others_are(found, calls):
    made, codes = calls
    codes |= {"benchmarks.speed.targets": None, "benchmarks.speed.evaluation": 1}
    parts = ["--device", "cpu", "--tiny", "--parts", "tests", "speed-32", "evaluation"]
    rows = found(*parts)
    assert [rows[part]["status"] for part in parts[-3:]] == ["done", "cut off", "failed"]
    assert rows["tests"]["tail"] == ["pytest ran"]
    codes.clear()
    rows = found(*parts)
    assert made == ["pytest", *["benchmarks.speed.targets", "benchmarks.speed.evaluation"] * 2]
    assert {row["status"] for row in rows.values()} == {"done"}


def test_a_fit_goes_on_from_its_last_checkpoint(found, calls, tmp_path, monkeypatch):
    fit = ["--device", "cpu", "--tiny", "--parts", "cifar10-vogn", "--minutes", "9"]
    first = found(*fit)["cifar10-vogn"]["command"]
    assert "--trainer.max_time=00:00:08:00" in first
    assert not any(word.startswith("--ckpt_path") for word in first)
    saved = tmp_path / "cifar10-vogn" / "last.ckpt"
    saved.parent.mkdir(exist_ok=True)
    saved.touch()
    assert f"--ckpt_path={saved}" in found(*fit, "--again")["cifar10-vogn"]["command"]


def test_data_that_is_not_there_is_named(found):
    row = found("--device", "cpu", "--parts", "cifar10-adam", "--data", "nowhere")["cifar10-adam"]
    assert row["status"] == "skipped"
    assert "nowhere is not a folder" in row["reason"]
