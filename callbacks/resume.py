"""Resuming from a checkpoint: what must agree, and which arguments the checkpoint overrides."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.num_data import infer_num_data, with_augmentation_factor
from lightning_bayes.callbacks.rollback import RollbackOnFailedResume
from lightning_bayes.callbacks.schedulers import cycles_momentum
from lightning_bayes.callbacks.swap import SwapSettings
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import MeanFieldOptimizer, value_at
from lightning_bayes.optim.readout import callback_state
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.weight_prior import holds_priors


@final
class ResumeGuard:
    """Refuses checkpoints that cannot be resumed, before anything is changed, and warns about overridden arguments."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}  # the callback's state in the checkpoint
        self._rollback: RollbackOnFailedResume | None = None  # None outside of a fit

    def start(self, strategy: Strategy, module: LightningModule) -> RollbackOnFailedResume:
        """Prepare for a fit that may resume from a checkpoint.

        Returns:
            The loader of the checkpoint, to be called in place of the strategy's.
        """
        self._rollback = RollbackOnFailedResume(strategy, module)
        return self._rollback

    def read(self, checkpoint: Mapping[str, Any], callback: str) -> None:
        """Read the callback's state from the checkpoint to resume from.

        Args:
            checkpoint: Contents of a Lightning checkpoint.
            callback: Name of the callback's class, for the message.

        Raises:
            PosteriorError: If the checkpoint holds no state of a noisy optimizer.
        """
        groups = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
        # A distributed checkpoint has no optimizer_states: the strategy loads them from separate files.
        is_noisy = "noise_seed" in groups[0] if groups else bool(callback_state(checkpoint))
        if not is_noisy:
            raise PosteriorError(
                f"The checkpoint was not written with {callback}, so it holds no posterior to resume. To start from its "
                "weights, load them into the module and fit without ckpt_path."
            )
        self._saved = callback_state(checkpoint)

    def check_order(self, names: list[list[str]]) -> None:
        """Require the order of parameters in the checkpoint, because optimizer state is saved by position.

        Args:
            names: Names of the new optimizer's parameters, by group.

        Raises:
            PosteriorError: If they differ.
        """
        saved = self._saved.get("param_names", names)
        if saved == names:
            return
        saved_order, current_order = ", ".join(chain(*saved)), ", ".join(chain(*names))
        raise PosteriorError(
            "configure_optimizers returns parameters in another order or other groups than the checkpoint holds, so "
            f"their curvature would be mixed up (saved: {saved_order}; now: {current_order}). Restore the old order."
        )

    def commit(self) -> None:
        """Keep the loaded weights: the run has started."""
        if self._rollback is not None:
            self._rollback.commit()

    def warn_of_changes(self, trainer: Trainer, optimizer: MeanFieldOptimizer, settings: SwapSettings) -> None:
        """Warn about arguments that the checkpoint overrides, after the optimizer's state was restored."""
        restored = dict(optimizer.param_groups[0])
        requested = _requested_hyperparameters(trainer, settings)
        if "lr" in self._saved and not callable(settings.lr):
            # The group's lr follows the user's scheduler, so the callbacks' arguments are compared.
            restored["lr"], requested["lr"] = self._saved["lr"], settings.lr
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

    def end(self) -> None:
        """Restore the module's old weights if the run has not started."""
        if self._rollback is not None:
            self._rollback.roll_back()
            self._rollback = None


def _requested_hyperparameters(trainer: Trainer, settings: SwapSettings) -> dict[str, Any]:
    """Hyperparameters of a group that the callback's arguments determine, by name."""
    requested = with_augmentation_factor(settings.group_defaults, trainer)
    requested["noisy"] = settings.optimizer_class.noisy
    requested["noise_seed"] = settings.optimizer_kwargs["seed"]
    requested["num_data"] = settings.num_data or infer_num_data(trainer)
    if settings.prior.precision is not None:
        requested["prior_precision"] = settings.prior.precision
    if cycles_momentum(config.scheduler for config in trainer.strategy.lr_scheduler_configs):
        del requested["betas"]  # a scheduler changes them
    if settings.defaults.is_default_interval:
        del requested["curvature_interval"]
    if requested["antithetic"] is None:
        del requested["antithetic"]
    if settings.defaults.noise is not None:
        del requested["relative_noise"], requested["noise_flatness"]  # set once the loss is known
    return requested
