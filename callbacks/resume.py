"""Resuming from a checkpoint: what must agree, which arguments the checkpoint overrides, and the way back if it fails."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.default_policy import ChosenDefaults
from lightning_bayes.callbacks.num_data import infer_num_data, with_augmentation_factor
from lightning_bayes.callbacks.schedulers import cycles_momentum
from lightning_bayes.errors import BayesError, PosteriorError
from lightning_bayes.optim import VariationalOptimizer, value_at
from lightning_bayes.optim.readout import callback_state
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.weight_prior import holds_priors


def resumable_state(checkpoint: Mapping[str, Any], callback: str) -> dict[str, Any]:
    """The callback's state in a checkpoint to resume from; raises `PosteriorError` if no noisy optimizer wrote it."""
    groups = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
    state = callback_state(checkpoint)
    # A distributed checkpoint has no optimizer_states: the strategy loads them from separate files.
    is_noisy = "noise_seed" in groups[0] if groups else bool(state)
    if not is_noisy:
        raise PosteriorError(
            f"The checkpoint was not written with {callback}, so it holds no posterior to resume. To start from its "
            "weights, load them into the module and fit without ckpt_path."
        )
    return state


def require_same_order(saved: list[list[str]], names: list[list[str]]) -> None:
    """Require the order of parameters in the checkpoint, because optimizer state is saved by position."""
    if saved == names:
        return
    saved_order, current_order = ", ".join(chain(*saved)), ", ".join(chain(*names))
    raise PosteriorError(
        "configure_optimizers returns parameters in another order or other groups than the checkpoint holds, so "
        f"their curvature would be mixed up (saved: {saved_order}; now: {current_order}). Restore the old order."
    )


def warn_of_changes(
    trainer: Trainer, optimizer: VariationalOptimizer, chosen: ChosenDefaults, saved: Mapping[str, Any]
) -> None:
    """Warn about arguments that the checkpoint overrides, after the optimizer's state was restored.

    `saved` is the callback's state in the checkpoint.
    """
    restored = dict(optimizer.param_groups[0])
    requested = _requested_hyperparameters(trainer, chosen)
    lr = chosen.arguments.lr
    if "lr" in saved and not callable(lr):
        # The group's lr follows the user's scheduler, so the callbacks' arguments are compared.
        restored["lr"], requested["lr"] = saved["lr"], lr
    requested = plain({name: value_at(value, restored["step"]) for name, value in requested.items()})
    changed = [
        f"{name}={restored[name]!r} (now {value!r})" for name, value in requested.items() if restored[name] != value
    ]
    if changed:
        rank_zero_warn(f"The resumed run keeps the checkpoint's {', '.join(changed)}.")
    if not holds_priors(optimizer.state, optimizer.weight_priors):
        rank_zero_warn(
            "The resumed run keeps the checkpoint's prior of each weight, which differs from the callback's prior=. "
            "Start a new fit for another prior."
        )


def _requested_hyperparameters(trainer: Trainer, chosen: ChosenDefaults) -> dict[str, Any]:
    """Hyperparameters of a group that the callback's arguments determine, by name."""
    arguments = chosen.arguments
    requested = with_augmentation_factor(arguments.group_defaults, trainer)
    requested["noisy"] = arguments.optimizer_class.noisy
    requested["noise_seed"] = arguments.optimizer_kwargs["seed"]
    requested["num_data"] = arguments.num_data or infer_num_data(trainer)
    if chosen.prior.precision is not None:
        requested["prior_precision"] = chosen.prior.precision
    if cycles_momentum(config.scheduler for config in trainer.strategy.lr_scheduler_configs):
        del requested["betas"]  # a scheduler changes them
    if chosen.is_default_interval:
        del requested["curvature_interval"]
    if requested["antithetic"] is None:
        del requested["antithetic"]
    if chosen.noise is not None:
        del requested["relative_noise"], requested["noise_flatness"]  # set once the loss is known
    return requested


@final
class RollbackOnFailedResume:
    """Loads a checkpoint, and restores the module's old weights if the run does not start.

    Lightning copies the matching weights before it raises an error about the others, and before it restores the optimizer.
    """

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self._load, self._module = strategy.load_checkpoint, module
        # This strategy loads weights and optimizer together, before `require_same_order` can check the optimizer state.
        self._loads_optimizer = isinstance(strategy, ModelParallelStrategy)
        self._old_weights: dict[str, Tensor] = {}
        self._has_started = False

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Replacement of the strategy's method; raises `PosteriorError` if a sharded checkpoint does not fit."""
        if not self._has_started:  # Lightning's tuner also restores in the middle of a run
            self._old_weights = {name: value.clone() for name, value in self._tensors().items()}
        try:
            return self._load(path, *arguments, **options)
        except Exception as error:
            if not self._loads_optimizer or isinstance(error, BayesError):
                raise
            raise PosteriorError(
                f"{path} cannot be loaded into this model and optimizer ({type(error).__name__}: {error}). Resume with the "
                "model and the callback that wrote it. To start from its weights alone, load them in configure_model."
            ) from error

    def commit(self) -> None:
        """Forget the old weights: the run has started."""
        self._old_weights, self._has_started = {}, True

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restore the old weights unless the run has started."""
        current = self._tensors()
        for name, value in self._old_weights.items():
            current[name].copy_(value)
        self._old_weights = {}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
