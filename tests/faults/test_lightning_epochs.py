"""A miscount of Lightning's own, without anything of this package: what docs/distributed.md warns of.

Resumed from a step checkpoint of an epoch's last batch, Lightning counts that epoch as done but does not note that the
next one has begun. A second checkpoint from within that next epoch then reads as one from between epochs, and the run
that goes on from it makes the updates of that epoch so far once more, at its end.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import quiet_trainer

BATCHES, EPOCHS = 6, 5


class StatefulLoader:
    """Goes on with the next batch."""

    position, start = 0, 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        start, self.start = self.start, 0
        for batch in range(start, BATCHES):
            self.position = batch + 1
            yield torch.ones(1, 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"] % BATCHES


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Killed(Exception):
    pass


class KillAfter(Callback):
    def __init__(self, updates):
        self.updates = updates

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.updates:
            raise Killed


def updates_of(folder, resume=None, killed_after=None):
    """Updates of a run that goes on from its checkpoint at update `resume`."""
    every = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, enable_version_counter=False
    )
    trainer = quiet_trainer(every, KillAfter(killed_after), max_epochs=EPOCHS, enable_checkpointing=True)
    with contextlib.suppress(Killed):
        trainer.fit(Net(), StatefulLoader(), ckpt_path=resume and folder / f"step={resume}.ckpt")
    return trainer.global_step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(("first", "second", "too_many"), [(4, 8, 0), (6, 8, 2), (6, 10, 4), (6, 12, 6)])
def test_lightning_makes_updates_twice_after_the_last_batchs_step_checkpoint(tmp_path, first, second, too_many):
    """Where this fails, Lightning has mended it, and the warning can go; from elsewhere in the epoch it counts right."""
    updates_of(tmp_path, killed_after=first + 1)
    assert updates_of(tmp_path, resume=first) == BATCHES * EPOCHS  # one resume is as it should be
    updates_of(tmp_path, resume=first, killed_after=second + 1)
    assert updates_of(tmp_path, resume=second) == BATCHES * EPOCHS + too_many
