"""Training of an ensemble's further members: the user's fit again, from fresh weights, once per member."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.callbacks.calibration_base import CalibrationCallback
from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.callbacks.neighbours import callbacks_of
from lightning_bayes.callbacks.private_lightning import data_of_fit
from lightning_bayes.callbacks.recalibration import BatchNormRecalibration
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, UnsupportedTrainingError, name_some
from lightning_bayes.optim.readout import read_checkpoint
from lightning_bayes.private_torch import ATTENTION_RESET

_OBSERVERS: Final = (
    *(BatchNormRecalibration, CalibrationCallback, Checkpoint, DeviceStatsMonitor, EvaluationCallback),
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
)
_TRAINING_HOOKS: Final = ("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end")


@final
class MemberFits:
    """Trains the members of an ensemble one after the other: the first is the user's own fit."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._untouched: LightningModule | None = None

    def prepare(self, trainer: Trainer, module: LightningModule) -> None:
        """Copy the module before its fit, and refuse a fit that cannot be repeated."""
        if trainer.world_size > 1:
            raise UnsupportedTrainingError(
                f"members={self.count} trains the members in one process, but this trainer has {trainer.world_size}. Train "
                "each member with a run of its own, and pass the paths of their checkpoints as members=[...]."
            )
        if trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise HyperparameterError(f"members={self.count} needs fits that end. Pass max_epochs or max_steps.")
        layers_to_reset(module)
        self._untouched = copy.deepcopy(module)
        rank_zero_info(
            f"DeepEnsembleCallback: trains {self.count} networks one after the other, which takes about {self.count} times "
            "as long as one, and so does every prediction afterwards."
        )
        dropped = [type(c).__name__ for c in callbacks_of(trainer, Callback) if _changes_training(c)]
        if dropped:
            rank_zero_warn(f"Members 2 to {self.count} train without the callbacks {', '.join(dropped)}.")

    def run(self, trainer: Trainer, folder: Path) -> None:
        """Train the members that `folder` lacks, after the first fit, and save each there."""
        untouched, self._untouched = self._untouched, None
        if untouched is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        _save(trainer, member_path(folder, 0))
        for index in range(1, self.count):
            path = member_path(folder, index)
            if trainer.ckpt_path is not None and _is_trained(path, trainer):
                rank_zero_info(f"DeepEnsembleCallback: member {index + 1} of {self.count} is trained already: {path}")
                continue
            rank_zero_info(f"DeepEnsembleCallback: trains member {index + 1} of {self.count}.")
            _save(_fitted(trainer, copy.deepcopy(untouched), self.seed + index), path)


def member_path(folder: str | Path, index: int) -> Path:
    """The checkpoint of a member, counted from 0."""
    return Path(folder) / f"member_{index + 1}.ckpt"


def layers_to_reset(module: nn.Module) -> list[Callable[[], None]]:
    """The `reset_parameters` of all layers with a trained parameter, children first; refuses random starts of no layer."""
    resets = {name: reset for name, layer in module.named_modules() if (reset := _reset_of(layer))}
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    params = dict(module.named_parameters())
    without = [name for name in trained if not any(owner in resets for owner in _owners(name))]
    stuck = [name for name in without if len(without) == len(trained) or not _is_constant(params[name])]
    if stuck:
        raise UnsupportedLayerError(
            f"{type(module).__name__} cannot start again from fresh weights: no layer with a method reset_parameters holds "
            f"{name_some(stuck)}. Define it, or train each member under a seed of its own and pass the paths of their "
            "checkpoints as members=[...]."
        )
    owners = {owner for name in trained for owner in _owners(name)}
    return [reset for name, reset in reversed(resets.items()) if name in owners]


def _is_constant(param: Tensor) -> bool:
    """Whether all entries are the same, as of a scale or an offset, which every member starts with."""
    return bool((param == param.flatten()[:1]).all())


def _reset_of(layer: nn.Module) -> Callable[[], None] | None:
    name = ATTENTION_RESET if isinstance(layer, nn.MultiheadAttention) else "reset_parameters"
    reset = getattr(layer, name, None)
    return reset if callable(reset) else None


def _owners(name: str) -> Iterator[str]:
    """The names of all modules around a parameter, the outermost of which is the empty name."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@final
class _FreshWeights(Callback):
    """Draws the initial weights anew, once the module is configured."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for reset in layers_to_reset(pl_module):
                reset()


def _fitted(trainer: Trainer, module: LightningModule, seed: int) -> Trainer:
    """Fit a copy of the module as `trainer` fitted the original."""
    member, data = Trainer(callbacks=[_FreshWeights()], **_arguments(trainer)), data_of_fit(trainer)
    try:
        with isolate_rng():
            random.seed(seed)
            torch.manual_seed(seed)
            member.fit(module, **data)
    finally:
        if "datamodule" in data:
            data["datamodule"].trainer = trainer
    return member


def _arguments(trainer: Trainer) -> dict[str, Any]:
    """The arguments that repeat a fit."""
    root = trainer.strategy.root_device
    return {
        **{name: getattr(trainer, name) for name in _REPEATED},
        "accelerator": "gpu" if root.type == "cuda" else root.type,
        "devices": 1 if root.type == "cpu" else [root.index or 0],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": trainer.progress_bar_callback is not None,
    }


def _save(trainer: Trainer, path: Path) -> None:
    """Save the weights under another name first: a file of this name is whole."""
    unfinished = path.with_suffix(".part")
    trainer.save_checkpoint(unfinished, weights_only=True)
    os.replace(unfinished, path)


def _is_trained(path: Path, trainer: Trainer) -> bool:
    """Whether a member's checkpoint is from the end of a fit as long as this one."""
    if not path.is_file():
        return False
    checkpoint, epochs, steps = read_checkpoint(path), trainer.max_epochs or -1, trainer.max_steps
    return bool(0 < epochs <= checkpoint["epoch"] or 0 < steps <= checkpoint["global_step"])


def _changes_training(callback: Callback) -> bool:
    """Whether a callback acts in training, and does not only watch it."""
    is_observer = isinstance(callback, _OBSERVERS)
    return not is_observer and any(is_overridden(hook, callback, Callback) for hook in _TRAINING_HOOKS)
