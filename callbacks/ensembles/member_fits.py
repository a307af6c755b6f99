"""Training of an ensemble's further members: the user's fit again, from fresh weights, once per member."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_bayes.callbacks.calibration import Calibration
from lightning_bayes.callbacks.ensembles.member_starts import copies_of, draw_anew, layers_to_reset
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback
from lightning_bayes.callbacks.evaluation.first_loss import FirstLoss
from lightning_bayes.callbacks.recalibration import BatchNormRecalibration
from lightning_bayes.callbacks.trainer.fitted_weights import checksum
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.callbacks.trainer.private_lightning import data_of_fit
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.optim.readout import read_checkpoint
from lightning_bayes.posteriors import atomic_save

_OBSERVERS: Final = (
    *(BatchNormRecalibration, Calibration, Checkpoint, DeviceStatsMonitor, EvaluationCallback, FirstLoss),
    *(LearningRateMonitor, ModelSummary, ProgressBar),
)
_REPEATED: Final = (
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "check_val_every_n_epoch",
    "val_check_interval",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "precision",
    "gradient_clip_algorithm",
    "reload_dataloaders_every_n_epochs",
    "default_root_dir",
    "log_every_n_steps",
)
_TRAINING_HOOKS: Final = (
    *("setup", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"),
    *(
        "on_train_batch_end",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ),
)


@final
class MemberFits:
    """Trains the members of an ensemble one after the other: the first is the user's own fit."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._member: Callable[[], LightningModule] | None = None  # a copy of the untouched module
        self._callbacks: list[Callback] = []
        self._parts: dict[str, Any] = {}  # modules and parameters, which callbacks may hold, by name
        self._arguments: dict[str, Any] = {}

    def prepare(self, trainer: Trainer, module: LightningModule) -> None:
        """Copy the module and the callbacks before the fit, and refuse a fit that cannot be repeated."""
        if trainer.world_size > 1:
            raise UnsupportedTrainingError(
                f"members={self.count} trains the members in one process, but this trainer has {trainer.world_size}. Train "
                "each member with a run of its own, and pass the paths of their checkpoints as members=[...]."
            )
        if trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise HyperparameterError(f"members={self.count} needs fits that end. Pass max_epochs or max_steps.")
        layers_to_reset(module)
        self._arguments = _arguments(trainer)
        self._member = copies_of(trainer, module)
        self._parts = _parts(module)
        shared = {id(part): part for part in (trainer, *self._parts.values())}
        self._callbacks, dropped = _copied(callbacks_of(trainer, Callback), shared)
        names = ", ".join(type(callback).__name__ for callback in self._callbacks)
        rank_zero_info(
            f"DeepEnsembleCallback: trains {self.count} networks one after the other, which takes about {self.count} times "
            "as long as one, and so does every prediction afterwards."
            + (f" Each trains with its own copies of {names}, and without a logger." if names else "")
        )
        if dropped:
            rank_zero_warn(
                f"Members 2 to {self.count} train without the callbacks {'; '.join(dropped)}. Make them copyable, or train "
                "each member with a run of its own and pass members=[...]."
            )

    def run(self, trainer: Trainer, folder: Path) -> list[int]:
        """Train the members that `folder` lacks, after the first fit, and save each there; returns their checksums."""
        untouched, self._member = self._member, None
        if untouched is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return []
        paths = [member_path(folder, index) for index in range(self.count)]
        _save(trainer, paths[0])
        for index, path in enumerate(paths[1:], start=1):
            if path.is_file():
                rank_zero_info(f"DeepEnsembleCallback: member {index + 1} of {self.count} is trained already: {path}")
                continue
            rank_zero_info(f"DeepEnsembleCallback: trains member {index + 1} of {self.count}.")
            _save(self._fitted(trainer, untouched(), self.seed + index), path)
        self._callbacks = []
        return [checksum(read_checkpoint(path)["state_dict"]) for path in paths]

    def _fitted(self, trainer: Trainer, module: LightningModule, seed: int) -> Trainer:
        """Fit a copy of the module as `trainer` fitted the original."""
        parts = _parts(module)
        own = {id(part): parts[name] for name, part in self._parts.items() if name in parts}
        callbacks = copy.deepcopy(self._callbacks, {id(trainer): trainer, **own})
        member, data = Trainer(callbacks=[_FreshWeights(), *callbacks], **self._arguments), data_of_fit(trainer)
        try:
            with isolate_rng():
                random.seed(seed)
                torch.manual_seed(seed)
                member.fit(module, **data)
        finally:
            if "datamodule" in data:
                data["datamodule"].trainer = trainer
        return member


def member_path(folder: str | Path, index: int) -> Path:
    """The checkpoint of a member, counted from 0."""
    return Path(folder) / f"member_{index + 1}.ckpt"


@final
class _FreshWeights(Callback):
    """Draws the initial weights anew, once the module is configured."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        draw_anew(pl_module)


def _arguments(trainer: Trainer) -> dict[str, Any]:
    """The arguments that repeat a fit."""
    root = trainer.strategy.root_device
    return {
        **{name: getattr(trainer, name) for name in _REPEATED},
        "accelerator": "gpu" if root.type == "cuda" else root.type,
        "devices": 1 if root.type == "cpu" else [root.index or 0],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "num_sanity_val_steps": 0,
        "logger": DummyLogger() if trainer.loggers else False,  # the callbacks may write to one
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": trainer.progress_bar_callback is not None,
    }


def _save(trainer: Trainer, path: Path) -> None:
    """Save the weights alone: objects among the hyperparameters could not be read back."""
    checkpoint = {
        "state_dict": trainer.lightning_module.state_dict(),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning_version,
    }
    atomic_save(path, checkpoint, "member", "Free space, and resume the fit with ckpt_path=...")


def _parts(module: LightningModule) -> dict[str, Any]:
    """The modules and parameters of a module, by name."""
    return {**dict(module.named_modules()), **dict(module.named_parameters())}


def _copied(callbacks: list[Callback], shared: dict[int, Any]) -> tuple[list[Callback], list[str]]:
    """Copies of the callbacks that may act in training, and the names of those that cannot be copied, with the reason."""
    copies, dropped = [], []
    for callback in callbacks:
        if not _changes_training(callback):
            continue
        try:
            copies.append(copy.deepcopy(callback, dict(shared)))
        except Exception as error:  # whatever the callback holds
            dropped.append(f"{type(callback).__name__} ({type(error).__name__}: {error})")
    return copies, dropped


def _changes_training(callback: Callback) -> bool:
    """Whether a callback may act in training, and does not only watch it, as those that report to a search do."""
    is_observer = isinstance(callback, _OBSERVERS)
    return not is_observer and any(is_overridden(hook, callback, Callback) for hook in _TRAINING_HOOKS)
