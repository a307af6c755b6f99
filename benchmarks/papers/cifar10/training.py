"""One run: fit an ordinary task with its own optimizer and a callback, then run the test of `lightning-bayes test`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning.pytorch import Trainer, seed_everything
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.papers.cifar10.methods import MEMBERS, Settings, callback, optimizer
from benchmarks.papers.cifar10.networks import NETWORKS, Network
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import DeepEnsembleCallback
from lightning_bayes.zoo import BayesClassifier, CIFAR10DataModule


class Run(NamedTuple):
    """The specification of a run, without the machine."""

    model: str
    method: str
    settings: Settings
    augment: bool
    epochs: int
    seed: int


def train_and_test(run: Run, root: str, ood: tuple[str, ...], accelerator: str, num_workers: int) -> dict[str, Any]:
    """Train once and measure."""
    network = NETWORKS[run.model]
    data = CIFAR10DataModule(root, False, network.batch, num_workers, val_size=0, augment=run.augment, ood=ood)
    start = time.perf_counter(), time.process_time()
    with quiet(), TemporaryDirectory() as folder:
        if run.method == "ensemble":
            members = [Path(folder) / f"{member}.ckpt" for member in range(MEMBERS)]
            for number, path in enumerate(members):
                _fit(run._replace(seed=run.seed + 1000 * number), data, accelerator)[0].save_checkpoint(path)
            trainer, task = quiet_trainer([DeepEnsembleCallback(members)], 0, accelerator), _task(network, run)
        else:
            trainer, task = _fit(run, data, accelerator)
        seconds, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        trainer.test(task, datamodule=data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    cost = {"seconds": round(seconds / run.epochs, 2), "cpu_seconds": round(cpu / run.epochs, 2)}
    return {**run._asdict(), "ood": [Path(entry).name for entry in ood], "metrics": metrics, **cost}


def _fit(run: Run, data: CIFAR10DataModule, accelerator: str) -> tuple[Trainer, BayesClassifier]:
    seed_everything(run.seed, verbose=False)
    network = NETWORKS[run.model]
    task = _task(network, run)
    method_callback = callback(network, run.method, run.settings, task, data.data_augmentation_factor, seed=run.seed)
    trainer = quiet_trainer([method_callback], run.epochs, accelerator)
    trainer.fit(task, datamodule=data)
    return trainer, task


def _task(network: Network, run: Run) -> BayesClassifier:
    milestones = [round(run.epochs * fraction) for fraction in (0.5, 0.75)]
    schedule = partial(MultiStepLR, milestones=milestones) if network.decays else None
    build_optimizer = optimizer(network, run.method, run.settings)
    return BayesClassifier(network.build(), num_classes=10, optimizer=build_optimizer, lr_scheduler=schedule)
