"""What goes wrong in the processes of the fault tests; in a file of its own, because processes import it by name."""

from __future__ import annotations

import os
import resource
import signal
import traceback
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from tiny_training import Classifier, loader, quiet_trainer, weights

from lightning_bayes import VOGNCallback

PASSES_BEFORE = 11  # of updates with two passes each: the second one of the sixth update
SMALL_FILE = 12_000  # bytes: less than a checkpoint has, more than the output of a process


def kill_rank_0(trainer, passes):
    kill(trainer, passes, 0)


def kill_rank_1(trainer, passes):
    kill(trainer, passes, 1)


def kill(trainer, passes, rank):
    if passes == PASSES_BEFORE * trainer.accumulate_grad_batches and trainer.global_rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def full_disk(trainer, passes):
    """From here on no file can grow beyond a size, as on a full disk: part of it is written, then an error."""
    if passes == PASSES_BEFORE:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, hard))


def killed_in_writing(trainer, passes):
    """The kernel ends the process in the middle of the next checkpoint."""
    if passes == PASSES_BEFORE:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    full_disk(trainer, passes)


class Signalled(Classifier):
    """Gets a signal in the middle of a pass, where the weights are a sample."""

    def __init__(self, signum):
        super().__init__()
        self.signum, self.means = signum, []

    def on_train_batch_start(self, batch, batch_idx):
        self.means.append(weights(self))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.training_steps == PASSES_BEFORE:
            self.sampled = weights(self)
            os.kill(os.getpid(), self.signum)
        return loss


def train_and_signal(signum: int, folder: Path) -> None:
    """Write what the module held before, in and after the pass; the checkpoint is Lightning's, written on the way out."""
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    module = Signalled(signum)
    callback = VOGNCallback(lr=0.05, init_precision=100.0, mc_samples=2, num_data=48)
    trainer = quiet_trainer(
        callback, OnExceptionCheckpoint(folder, "interrupted"), max_epochs=3, enable_checkpointing=True
    )
    try:
        trainer.fit(module, loader())
        ended = "finished"
    except BaseException as error:
        traceback.print_exc()
        ended = type(error).__name__
    found = {"ended": ended, "updates": callback.optimizer.num_updates, "passes": module.training_steps}
    torch.save(
        {**found, "before": module.means[-1], "sampled": module.sampled, "after": weights(module)}, folder / "found.pt"
    )
