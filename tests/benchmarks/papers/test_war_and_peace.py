"""The character model on a small text: chunks, every method, and a run that goes on between epochs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks.papers import war_and_peace as command
from benchmarks.papers.war_and_peace import CHUNK, CONTEXT, METHODS

TEXT = "She said that all happy families are alike, and he looked at her. " * 60


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    small = ["--seeds", "1", "--hidden", "8", "--work", str(tmp_path / "work"), "--json", str(tmp_path / "r.json")]
    return ["--path", str(tmp_path / "text.txt"), *small]


def saved(tmp_path):
    return json.loads((tmp_path / "r.json").read_text("utf-8"))["results"]


def test_chunks_predict_every_character_after_the_first_context_once(tmp_path):
    part = command.windows(torch.arange(1000))
    targets = part.tensors[0][:, CONTEXT + 1 :].flatten()
    assert torch.equal(targets, torch.arange(CONTEXT + 1, CONTEXT + 1 + len(targets)))
    assert len(targets) > 1000 - 2 * CHUNK


def test_a_logit_depends_on_the_characters_before_its_target_only(generator):
    model = command.CharacterModel(7, 8, METHODS["adam"])
    window = torch.randint(7, (1, CONTEXT + CHUNK), generator=generator)
    changed = window.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7  # the input of the last logit alone
    one, two = model(window), model(changed)
    torch.testing.assert_close(one[..., :-1], two[..., :-1])
    assert not torch.equal(one[..., -1], two[..., -1])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_is_tested(method, arguments, tmp_path):
    command.main([*arguments, "--methods", method, "--epochs", "1"])
    (row,) = saved(tmp_path)
    assert len(row["curve"]) == 1
    assert math.isfinite(row["nats"])


def test_a_run_stopped_between_epochs_goes_on_to_the_same_curve(arguments, tmp_path, capsys):
    resumed = [*arguments, "--methods", "vadam", "--epochs", "3"]
    for epochs in (1, 2):
        command.main([*resumed, "--minutes", "0"])
        assert f"vadam, seed 0: {epochs} of 3 epochs are done" in capsys.readouterr().out
    command.main(resumed)
    (row,) = saved(tmp_path)
    whole = [*arguments[:-4], "--work", str(tmp_path / "other"), "--json", str(tmp_path / "other.json")]
    command.main([*whole, "--methods", "vadam", "--epochs", "3"])
    (other,) = json.loads((tmp_path / "other.json").read_text("utf-8"))["results"]
    assert (row["curve"], row["nats"]) == (other["curve"], other["nats"])


def test_the_first_noise_of_vadagrad_is_the_printed_one():
    group = METHODS["vadagrad"].callback(10_000).group_defaults
    assert group["init_precision"] == command.START * 10_000
    assert group["betas"] == (0.0, 0.5)
