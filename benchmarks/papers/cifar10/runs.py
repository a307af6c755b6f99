"""One run: training that goes on from its last checkpoint, the test, and the test with one temperature."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR
from torch.utils.data import DataLoader

from benchmarks.defaults.scores import classification_scores
from benchmarks.papers.cifar10.networks import MEMBERS, NETWORKS, Settings, callback, optimizer
from benchmarks.quiet import quiet, quiet_trainer
from benchmarks.resuming import Kept, fit
from lightning_bayes import DeepEnsembleCallback
from lightning_bayes.predictive import fit_temperature
from lightning_bayes.zoo import BayesClassifier, CIFAR10DataModule


class Run(NamedTuple):
    """The specification of a run, without the machine."""

    model: str
    method: str
    settings: Settings
    augment: bool
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """A name for files."""
        return "-".join(map(str, self))


class Machine(NamedTuple):
    """Where a run reads, computes and keeps its checkpoints."""

    root: str
    ood: tuple[str, ...] = ()
    accelerator: str = "auto"
    num_workers: int = 0
    work: Path | None = None
    deadline: float | None = None  # of time.monotonic()
    device: str | None = None  # of the training images; None reads them from the data module


SCHEDULES: Final = {  # of the learning rate, for a number of epochs
    "constant": lambda epochs: None,
    "steps": lambda epochs: partial(MultiStepLR, milestones=[round(epochs / 2), round(0.75 * epochs)]),
    "cosine": lambda epochs: partial(LambdaLR, lr_lambda=partial(warm_up_then_cosine, epochs=epochs)),
}


def warm_up_then_cosine(epoch: int, epochs: int, warm_up: int = 5) -> float:
    """The factor of Shen et al. 2024: it grows over five epochs, then falls along half a cosine."""
    if epoch < warm_up:
        return (epoch + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (epoch - warm_up) / max(1, epochs - warm_up)))


class Logits(Callback):
    """Collects logits ``[samples, batch, classes]`` and targets of the test set."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep a batch in distribution."""
        if dataloader_idx == 0:
            self.batches.append((outputs["outputs"].cpu(), outputs["targets"].cpu()))

    def with_temperature(self) -> dict[str, float]:
        """Scores of each half of the test set under the temperature fitted on the other half, averaged."""
        logits, targets = torch.cat([x for x, _ in self.batches], 1), torch.cat([y for _, y in self.batches])
        halves = torch.arange(len(targets)) % 2 == 0
        scores: dict[str, list[float]] = {"temperature": [], "cls/NLL": [], "cal/ECE": []}
        for fitted, scored in ((halves, ~halves), (~halves, halves)):
            temperature = fit_temperature(logits[:, fitted], targets[fitted])
            found = classification_scores(logits[:, scored] / temperature, targets[scored])
            for name, value in zip(scores, (temperature, found["nll"], found["calibration"]), strict=True):
                scores[name].append(value)
        return {f"tempered/{name}": sum(values) / 2 for name, values in scores.items()}


def train_and_test(run: Run, machine: Machine) -> dict[str, Any]:
    """Train, or go on training, and measure; raises `Unfinished` at the deadline."""
    network = NETWORKS[run.model]
    data = CIFAR10DataModule(
        machine.root, False, network.batch, machine.num_workers, val_size=0, augment=run.augment, ood=machine.ood
    )
    with quiet(), TemporaryDirectory() as folder:
        work = machine.work or Path(folder)
        if run.method == "ensemble":
            members = [work / f"{run.name}-{member}.ckpt" for member in range(MEMBERS)]
            seconds = 0.0
            for number, path in enumerate(members):
                member, kept = _fit(run._replace(seed=run.seed + 1000 * number), data, machine, work)
                member.save_checkpoint(path)
                seconds += kept.seconds
            trainer, task = quiet_trainer([DeepEnsembleCallback(members)], 0, machine.accelerator), _task(run)
        else:
            trainer, kept = _fit(run, data, machine, work)
            task, seconds = trainer.lightning_module, kept.seconds
        logits = Logits()
        trainer.callbacks.append(logits)
        trainer.test(task, datamodule=data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()} | logits.with_temperature()
    ood = [Path(entry).name for entry in machine.ood]
    return {**run._asdict(), "ood": ood, "metrics": metrics, "cpu_seconds": round(seconds / run.epochs, 2)}


def _fit(run: Run, data: CIFAR10DataModule, machine: Machine, work: Path) -> tuple[Trainer, Kept]:
    seed_everything(run.seed, verbose=False)
    task, kept = _task(run), Kept(work / f"{run.name}.ckpt", run.seed, machine.deadline)
    method = callback(NETWORKS[run.model], run.method, run.settings, task, data.data_augmentation_factor, seed=run.seed)
    source = (
        data if machine.device is None else device_loader(machine.root, data.batch_size, run.augment, machine.device)
    )
    return fit(task, source, kept, [method], run.epochs, accelerator=machine.accelerator), kept


def _task(run: Run) -> BayesClassifier:
    network = NETWORKS[run.model]
    build_optimizer = optimizer(network, run.method, run.settings)
    schedule = SCHEDULES[network.schedule](run.epochs)
    return BayesClassifier(network.build(), num_classes=10, optimizer=build_optimizer, lr_scheduler=schedule)


def device_loader(root: str, batch: int, augment: bool, device: str) -> DataLoader[int]:
    """The training images as tensors on a device, where they are also cropped and mirrored."""
    images, targets = (part.to(device) for part in CIFAR10DataModule.read(root, train=True))
    mean, std = (
        255 * torch.tensor(each, device=device)[:, None, None]
        for each in (CIFAR10DataModule.mean, CIFAR10DataModule.std)
    )

    def batch_of(indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices, device=device)
        pixels = crop_and_mirror(images[rows]) if augment else images[rows]
        return (pixels - mean) / std, targets[rows]

    return DataLoader(range(len(images)), batch, shuffle=True, collate_fn=batch_of)  # type: ignore[arg-type]


def crop_and_mirror(images: Tensor, padding: int = 4) -> Tensor:
    """Pad images ``[batch, channels, side, side]`` with black, crop them to the old size, and mirror, at random."""
    count, side, device = len(images), images.shape[-1], images.device
    corners = torch.randint(2 * padding + 1, (2, count, 1), device=device)
    rows, columns = corners + torch.arange(side, device=device)  # [batch, side]
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = nn.functional.pad(images, [padding] * 4)
    return padded[torch.arange(count, device=device)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(
        0, 3, 1, 2
    )
