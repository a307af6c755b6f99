"""A small training run that can be killed at any moment and resumed, for the tests of faults.

Its data loader stores its position, so that a resumed epoch continues with the next batch. Two checkpoints are overwritten
repeatedly: ``within.ckpt`` every few updates and ``epoch.ckpt`` after each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import processes
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_bayes import BayesDDPStrategy, VOGNCallback
from lightning_bayes.optim.groups import flat

EXAMPLES, BATCH, FEATURES, CLASSES = 48, 8, 4, 3
BATCHES = EXAMPLES // BATCH
Fault: TypeAlias = Callable[[Trainer, int], None]  # called in every pass with the number of passes so far


@dataclass(frozen=True)
class Setting:
    """The setting of a run, the same for all of its processes.

    Args:
        folder: Folder of checkpoints, results and logs.
        ranks: Number of processes.
        micro_batches: Batches per rank and update; they divide the rank's part of the global batch of eight.
        groups: Noise groups; None for one per rank.
        epochs: Number of epochs, of six updates each.
        batch_norm: Whether the network has BatchNorm, whose statistics depend on the division of a batch.
        resume: Checkpoint to resume from.
        fault: A fault to inject.
    """

    folder: Path
    ranks: int = 1
    micro_batches: int = 1
    groups: int | None = None
    epochs: int = 3
    batch_norm: bool = True
    resume: Path | None = None
    fault: Fault | None = None


class StatefulLoader:
    """The part of every batch for one rank, in an order that depends on the epoch.

    Lightning saves and restores the state of a loader only within an epoch. At the start of an epoch it tells the sampler
    the epoch's number, also after a checkpoint from the end of an epoch.
    """

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(EXAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        self.micro_batches, self.size = micro_batches, BATCH // (ranks * micro_batches)
        self.first = rank * micro_batches * self.size
        self.epoch, self.position, self.start = 0, 0, 0  # position and start count the batches of updates
        self.sampler = self  # Lightning looks for set_epoch there

    def __len__(self) -> int:
        return BATCHES * self.micro_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self.start = self.start, 0
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        for batch in range(start, BATCHES):
            for micro in range(self.micro_batches):
                self.position = batch + (micro + 1 == self.micro_batches)
                first = batch * BATCH + self.first + micro * self.size
                rows = order[first : first + self.size]
                yield self.x[rows], self.y[rows]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the current epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The position within an epoch; the same on every rank."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position; after the last batch, with the next epoch."""
        self.start = state["position"] % BATCHES


class Net(LightningModule):
    """Two layers with a normalisation between them."""

    def __init__(self, batch_norm: bool, fault: Fault | None) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(6)
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), middle, nn.Tanh(), nn.Linear(6, CLASSES))
        self.fault, self.passes = fault, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one pass, with an optional fault."""
        self.passes += 1
        if self.fault is not None:
            self.fault(self.trainer, self.passes)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, which updates the mean."""
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def run(setting: Setting, rank: int = 0) -> dict[str, Tensor]:
    """Train in this process; returns weights, buffers, optimizer state and counters."""
    torch.manual_seed(0 if setting.resume is None else 1)  # a resumed run must not depend on its initial weights
    net = Net(setting.batch_norm, setting.fault)
    callback = VOGNCallback(mc_samples=2, betas=(0.9, 0.99), init_precision=300.0, num_data=EXAMPLES, eval_samples=0)
    trainer = Trainer(
        callbacks=[callback, *_checkpoints(setting.folder)],
        strategy=BayesDDPStrategy(num_groups=setting.groups),
        devices=setting.ranks,
        accelerator="cpu",
        max_epochs=setting.epochs,
        accumulate_grad_batches=setting.micro_batches,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = StatefulLoader(rank, setting.ranks, setting.micro_batches)
    trainer.fit(net, loader, ckpt_path=setting.resume)
    return learned(net, callback, trainer)


def _checkpoints(folder: Path) -> list[ModelCheckpoint]:
    always: dict[str, Any] = {"dirpath": folder, "enable_version_counter": False}
    return [
        ModelCheckpoint(filename="within", every_n_train_steps=4, **always),
        ModelCheckpoint(filename="epoch", every_n_epochs=1, save_on_train_epoch_end=True, **always),
    ]


def learned(net: LightningModule, callback: VOGNCallback, trainer: Trainer) -> dict[str, Tensor]:
    """Weights, buffers, the states of the optimizer and of the user's optimizer, and counters, by name."""
    assert callback.optimizer is not None
    base = callback.optimizer.base_step
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    for name, param in net.named_parameters():
        state = dict(callback.optimizer.state[param])
        state |= {f"base.{key}": value for key, value in base.base.state[param].items()} if base is not None else {}
        tensors |= {f"{name}/{key}": torch.as_tensor(value) for key, value in state.items()}
    group = flat(callback.optimizer.param_groups[0])
    tensors |= {key: torch.tensor(group[key]) for key in ("lr", "step", "num_data", "noise_seed")}
    return {**tensors, "global_step": torch.tensor(trainer.global_step)}


def run_on_rank(rank: int, setting: Setting) -> dict[str, Tensor]:
    """As `run`, for `processes`."""
    return run(setting, rank)


def start(setting: Setting) -> list[Any]:
    """Start the processes of a run; see `processes.start`."""
    return processes.start(run_on_rank, setting.ranks, setting.folder, setting)


def results(setting: Setting) -> list[dict[str, Tensor]]:
    """Read the final tensors of every rank."""
    return processes.results(setting.ranks, setting.folder)
