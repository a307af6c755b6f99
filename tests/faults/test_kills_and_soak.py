"""Runs that are killed at random moments resume to the same bits, and long runs do not grow."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from durable_run import Setting, results, start
from processes import finish
from tiny_training import assert_same_bits
from torch import nn

from lightning_bayes import IVON, VOGN, NoisyKFAC, Vadam
from lightning_bayes.optim.readout import read_checkpoint

pytestmark = pytest.mark.slow
EPOCHS = 20


def finished(setting):
    assert finish(start(setting)) == [0] * setting.ranks, (setting.folder / "rank0.log").read_text("utf-8")
    return results(setting)


def kill_at(setting, victim, seconds):
    """Kill a rank some time after the first checkpoint, when imports are done; whether it hit the run before its end."""
    processes = start(setting)
    while not (setting.folder / "within.ckpt").exists() and all(process.is_alive() for process in processes):
        time.sleep(0.001)
    time.sleep(seconds)
    processes[victim].kill()
    return finish(processes, 60)[victim] == -9


@pytest.mark.ddp
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_at_a_random_moment_ends_with_the_same_bits(ranks, tmp_path):
    """A kill may hit a pass, a reduction or the writing of a checkpoint; the newest readable one continues the run."""
    draw, setting, hits = random.Random(0), Setting(tmp_path / "whole", ranks=ranks, epochs=EPOCHS), 0
    expected = finished(setting)
    for attempt in range(4):
        killed = replace(setting, folder=tmp_path / str(attempt))
        hits += kill_at(killed, draw.randrange(ranks), 0.4 * draw.random())
        newest = max(killed.folder.glob("*.ckpt"), key=lambda path: read_checkpoint(path)["global_step"])
        for found, whole in zip(finished(replace(killed, resume=newest)), expected, strict=True):
            assert_same_bits(found, whole)
    assert hits


@pytest.mark.parametrize("method", [VOGN, Vadam, IVON, NoisyKFAC])
def test_a_long_run_keeps_no_tensors_and_stays_finite(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = method(model, num_data=960, base=torch.optim.Adam(model.parameters(), lr=1e-3))
    x = torch.randn(16, 4)
    live = []
    for update in range(1, 1501):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
        optimizer.step()
        if update % 500 == 0:
            assert loss.isfinite()
            gc.collect()
            live.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    assert live[0] == live[-1]
