"""Processes that are killed or interrupted, and disks that are full: the others say who, files stay whole, runs go on."""

from __future__ import annotations

import multiprocessing
import signal
import time
from dataclasses import replace

import injected_faults as faults
import pytest
import torch
from durable_run import Setting, results, start
from processes import IMPORTED, finish
from tiny_training import assert_same_bits

from lightning_bayes import load_posterior

pytestmark = pytest.mark.ddp
UPDATES = 18


def finished(setting):
    assert finish(start(setting)) == [0] * setting.ranks, (setting.folder / "rank0.log").read_text("utf-8")
    return results(setting)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing happened to, by number of ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return {ranks: finished(Setting(folder / str(ranks), ranks=ranks)) for ranks in (1, 2)}


def goes_on(setting, whole, checkpoint="within.ckpt"):
    """Resume from what the fault has left, and end at the same bits as without it."""
    resumed = finished(replace(setting, fault=None, resume=setting.folder / checkpoint))
    assert resumed[0]["global_step"] == UPDATES
    for found, expected in zip(resumed, whole[setting.ranks], strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_other_and_the_run_goes_on(victim, whole, tmp_path):
    """Within answer_seconds and a little: the other one's connection breaks, and it asks who is there."""
    fault = faults.kill_rank_1 if victim else faults.kill_rank_0
    setting = Setting(tmp_path, ranks=2, fault=fault, answer_seconds=1.0)
    processes = start(setting)
    processes[victim].join(60)
    killed = time.monotonic()
    codes = finish(processes, 30)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    assert time.monotonic() - killed < setting.answer_seconds + 5
    said = (tmp_path / f"rank{1 - victim}.log").read_text("utf-8")
    assert f"RankError: Rank {victim} does not answer (of 2 ranks; seen on rank {1 - victim}" in said
    assert "restart all ranks with ckpt_path=" in said
    goes_on(setting, whole)


@pytest.mark.parametrize("fault", [faults.terminate_rank_0, faults.terminate_rank_1, faults.terminate_all])
def test_ranks_end_after_the_same_update_whoever_is_terminated(fault, whole, tmp_path):
    """Also where the ranks get the signal in different updates: after the fourth, whose first pass the first one hit."""
    setting = Setting(tmp_path, ranks=2, fault=fault)
    assert finish(start(setting), 60) == [1, 1]
    for rank in range(2):
        assert (tmp_path / f"passes{rank}").read_text() == "8"  # two in an update
        assert (tmp_path / f"rank{rank}.log").read_text("utf-8").rstrip().endswith("SIGTERMException")
    assert torch.load(tmp_path / "within.ckpt", weights_only=True)["global_step"] == 4
    goes_on(setting, whole)


def test_a_kill_in_the_middle_of_writing_leaves_the_last_checkpoint_whole(whole, tmp_path):
    setting = Setting(tmp_path, fault=faults.killed_in_writing)
    assert finish(start(setting)) == [-signal.SIGXFSZ]
    partial = tmp_path / ".epoch.ckpt.partial"
    assert partial.stat().st_size == faults.SMALL_FILE  # it died in the middle
    assert torch.load(tmp_path / "within.ckpt", weights_only=True)["global_step"] == 4
    goes_on(setting, whole)
    assert not partial.exists()


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint_whole(whole, tmp_path):
    setting = Setting(tmp_path, fault=faults.full_disk)
    assert finish(start(setting)) == [1]
    said = (tmp_path / "rank0.log").read_text("utf-8")
    assert f"CheckpointError: The checkpoint {tmp_path}/epoch.ckpt could not be written (File too large)" in said
    assert "Free space or choose another directory, and resume with ckpt_path=" in said
    assert sorted(path.name for path in tmp_path.glob("*ckpt*")) == ["within.ckpt"]
    goes_on(setting, whole)


@pytest.mark.parametrize(
    ("signum", "ended", "passes", "updates"),
    [(signal.SIGTERM, "SIGTERMException", 12, 6), (signal.SIGINT, "SystemExit", 11, 5)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_inside_a_pass_leaves_the_mean_and_a_whole_checkpoint(signum, ended, passes, updates, tmp_path):
    """Ctrl-C breaks the pass off, whose update is dropped; after SIGTERM Lightning finishes the batch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=faults.train_and_signal, args=(signum, tmp_path))
    process.start()
    finish([process])
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert (found["ended"], found["passes"], found["updates"]) == (ended, passes, updates)
    assert not torch.equal(found["sampled"]["net.0.weight"], found["before"]["net.0.weight"])
    if signum == signal.SIGINT:
        assert_same_bits(found["after"], found["before"])
    assert_same_bits(load_posterior(tmp_path / "interrupted.ckpt").mean, found["after"])
