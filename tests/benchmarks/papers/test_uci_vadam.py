"""Khan et al.'s UCI table: folds, both log-likelihoods against torch.distributions, expected improvement, and resuming."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from benchmarks.papers import uci_vadam as command
from benchmarks.papers.regression.data import KHAN
from lightning_bayes.zoo.data.uci import read_uci

pytest.importorskip("sklearn", reason="expected improvement needs scikit-learn, of the extra bench")


def test_folds_share_no_row_with_their_training_rows_and_none_with_the_test_rows(root):
    stored, found = read_uci(root, "yacht"), command.folds(root, "yacht")
    train, test = stored.splits[0]
    assert len(train) == 120
    assert found.train.targets.shape == (5, 96)
    assert found.test.targets.shape == (5, 24)
    for fold in range(5):
        assert not torch.isin(found.test.targets[fold], found.train.targets[fold]).any()
    assert not set(train.tolist()) & set(test.tolist())


def test_both_log_likelihoods_are_those_of_mixtures(generator):
    """The joint one is the density of all rows as one vector, per row."""
    outputs, targets = torch.randn(7, 1, 5, generator=generator), torch.randn(5, generator=generator)
    joint, per_point = command.log_likelihoods(Normal(outputs, 0.5).log_prob(targets))
    equal = Categorical(torch.ones(7))
    together = MixtureSameFamily(equal, Independent(Normal(outputs[:, 0], 0.5), 1)).log_prob(targets) / 5
    alone = MixtureSameFamily(Categorical(torch.ones(5, 7)), Normal(outputs[:, 0].T, 0.5)).log_prob(targets).mean()
    torch.testing.assert_close(torch.cat([joint, per_point]), torch.stack([together, alone]))


def test_expected_improvement_finds_the_top_of_a_hill():
    box, tried, values = command.bounds("boston"), [], []
    for _ in range(30):
        tried.append(command.next_pair(tried, values, box))
        values.append(-((tried[-1][0] - 2) ** 2) / 4 - (tried[-1][1] + 1) ** 2 / 16)
    best = tried[int(np.argmax(values))]
    assert math.dist(best, (2, -1)) < 0.5
    assert all((box[:, 0] <= pair).all() and (pair <= box[:, 1]).all() for pair in tried)


@pytest.mark.parametrize("method", ["vadam", "vogn"])
def test_a_stopped_search_goes_on_to_the_same_pairs(method, root, tmp_path, capsys):
    def searched(name, *stops):
        for stop in stops:
            rows = json.loads((tmp_path / name).read_text("utf-8"))["results"] if (tmp_path / name).exists() else None
            row = rows[0] if rows else {"set": "yacht", "method": method, "tried": [], "values": []}
            setting = KHAN.at_most(96, epochs=1, mc_samples=1)
            list(command.tune(row, command.folds(root, "yacht"), setting, stop))
            (tmp_path / name).write_text(json.dumps({"results": [row]}))
        return row["tried"]

    assert searched("twice.json", 3, 7) == searched("once.json", 7)


def test_the_command_tunes_scores_and_does_not_repeat(root, tmp_path, monkeypatch, capsys):
    result = tmp_path / "result.json"
    arguments = ["--root", str(root), "--sets", "yacht", "--tune", "6", "--epochs", "1", "--json", str(result)]
    command.main(arguments)
    (row,) = json.loads(result.read_text("utf-8"))["results"]
    assert len(row["tried"]) == 6
    assert row["pair"] == row["tried"][int(np.argmax(row["values"]))]
    assert len(row["joint"]) == 1  # this set has one split
    monkeypatch.setattr(command, "scores", None)
    command.main(arguments)
    assert "| yacht | vadam |" in capsys.readouterr().out
