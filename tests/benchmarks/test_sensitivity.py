"""The search for wrong labels and the estimate of the test NLL, on images of noise."""

from __future__ import annotations

import json

import pytest
import torch
from fake_images import write_idx_sets

from benchmarks.papers import sensitivity as command


def test_relabelled_rows_have_another_class():
    labels = torch.arange(200) % 10
    changed, wrong = command.relabelled(labels, 0.1, seed=0)
    assert int(wrong.sum()) == 20
    assert torch.equal(changed != labels, wrong)
    assert changed.max() <= 9


def test_the_share_counts_as_many_rows_as_labels_are_wrong():
    wrong = torch.tensor([True, False, True, False])
    assert command.found_share(torch.tensor([4.0, 3.0, 2.0, 1.0]), wrong) == 0.5
    assert command.found_share(torch.tensor([4.0, 1.0, 3.0, 2.0]), wrong) == 1.0


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_a_run_ranks_by_every_score_and_estimates_after_every_epoch(structure, tmp_path, capsys):
    write_idx_sets(tmp_path)
    result, figure = tmp_path / "result.json", tmp_path / "figure.png"
    arguments = ["--root", str(tmp_path), "--rows", "20", "--share", "0.2", "--epochs", "2", "--seeds", "2"]
    command.main([*arguments, "--structure", structure, "--json", str(result), "--figure", str(figure)])
    kept = json.loads(result.read_text("utf-8"))
    assert [set(shares) for shares in kept["wrong_labels"]] == [set(command.SCORES)] * 2
    assert all(0 <= value <= 1 for shares in kept["wrong_labels"] for value in shares.values())
    assert [line["epoch"] for line in kept["over_training"]] == [1, 2]
    assert figure.stat().st_size > 1000
    assert "| sensitivity |" in capsys.readouterr().out
