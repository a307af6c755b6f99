"""Processes that are killed or interrupted, and disks that are full: files stay whole, runs go on."""

from __future__ import annotations

import multiprocessing
import signal
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
    """Runs that nothing happened to, by number of ranks and micro-batches."""
    folder = tmp_path_factory.mktemp("whole")
    kinds = {f"{ranks} {micro}": (ranks, micro) for ranks, micro in ((1, 1), (2, 1), (2, 2))}
    return {kind: finished(Setting(folder / name, *kind)) for name, kind in kinds.items()}


def goes_on(setting, whole, checkpoint="within.ckpt"):
    """Resume from what the fault has left, and end at the same bits as without it."""
    resumed = finished(replace(setting, fault=None, resume=setting.folder / checkpoint))
    assert resumed[0]["global_step"] == UPDATES
    for found, expected in zip(resumed, whole[setting.ranks, setting.micro_batches], strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_goes_on_after_a_rank_was_killed(victim, whole, tmp_path):
    setting = Setting(tmp_path, 2, 1 + victim, fault=faults.kill_rank_1 if victim else faults.kill_rank_0)
    codes = finish(start(setting), 60)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] != 0
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
