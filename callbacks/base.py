"""Variational inference on an unmodified LightningModule: one base class for the callbacks of the family.

`LightningSeam` patches the trainer, `swap_optimizer` replaces the user's optimizer after Lightning has set it up and before
anything is restored into it, `MonteCarloClosure` runs the passes, `ResumeGuard` watches over checkpoints, `DefaultPrior` and
`DefaultNoise` decide where the user has stated nothing, and `PosteriorEvaluation` averages predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import Unpack

from lightning_bayes.callbacks import checks, ranks, summary
from lightning_bayes.callbacks.checkpoint_io import use_plain_numbers
from lightning_bayes.callbacks.closure import MonteCarloClosure
from lightning_bayes.callbacks.default_policy import DefaultNoise, DefaultPrior, choose_step, default_interval
from lightning_bayes.callbacks.evaluated_posterior import EvaluatedPosterior
from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.callbacks.fields import CallbackFields, complete_arguments
from lightning_bayes.callbacks.model_parallel import check_model_parallel, complete_checkpoint, require_outside_of_pass
from lightning_bayes.callbacks.num_data import (
    infer_num_data,
    set_num_data,
    warn_of_other_examples,
    with_augmentation_factor,
)
from lightning_bayes.callbacks.posterior_as_prior import read_prior, warn_of_another_prior
from lightning_bayes.callbacks.presets import Preset, find_preset, presets_of
from lightning_bayes.callbacks.resume import ResumeGuard
from lightning_bayes.callbacks.schedulers import cycles_momentum
from lightning_bayes.callbacks.seam import LightningSeam
from lightning_bayes.callbacks.swap import SwapSettings, swap_optimizer
from lightning_bayes.callbacks.validation_samples import sample_count
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.readout import CALLBACK_KEY, callback_state
from lightning_bayes.optim.runtime.measuring import require_interval
from lightning_bayes.optim.settings import plain
from lightning_bayes.predictive import LinearizedSamples, PosteriorSamples, Samples
from lightning_bayes.strategies import BayesDDPStrategy


class VariationalCallback(EvaluationCallback, ABC):
    """Turns training of an unmodified LightningModule into variational inference.

    Arguments are keywords; numbers may be functions of the number of updates (`lightning_bayes.LinearSchedule` and others).

    Class attributes:
        optimizer_class: The optimizer that replaces the user's.
        field_defaults: Defaults of the callback, where they differ from the optimizer's.

    Args:
        **fields: See `CallbackFields`.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    field_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **fields: Unpack[CallbackFields]) -> None:
        found = complete_arguments(type(self).__name__, self.optimizer_class, fields, self.field_defaults)
        super().__init__(found.link)
        self.lr, self.num_data, self.linearized = found.lr, found.num_data, found.linearized
        self.eval_samples, self.val_samples = found.eval_samples, found.val_samples
        self.group_defaults, self.optimizer_kwargs = found.group_defaults, found.optimizer_kwargs
        self.mc_samples: int = found.optimizer_kwargs["mc_samples"]
        self.seed: int = found.optimizer_kwargs["seed"]
        self.prior = DefaultPrior(found.prior_precision, self.group_defaults["prior_mean"])
        self.default_noise: DefaultNoise | None = None
        if self.lr is None and self.group_defaults["relative_noise"] is None:
            self.default_noise = DefaultNoise(self.group_defaults["noise_flatness"])
            self.group_defaults["relative_noise"] = self.default_noise.first
        chosen = choose_step(type(self).__name__, self.optimizer_class, found.lr, found.step)
        self.group_defaults["step_rule"], self._grafts = chosen
        self._states_interval = self.group_defaults["curvature_interval"] is not None
        if not self._states_interval:
            interval = default_interval(self.optimizer_class, self.group_defaults["step_rule"])
            self.group_defaults["curvature_interval"] = interval
        require_interval(
            type(self).__name__, self.group_defaults["curvature_interval"], amortises=self.optimizer_class.amortises
        )
        self.optimizer: MeanFieldOptimizer | None = None
        self._seam, self._resume, self._posterior = LightningSeam(), ResumeGuard(), EvaluatedPosterior()
        self._names: dict[nn.Parameter, str] = {}
        self._ranks_agree = self._is_announced = False

    @property
    @abstractmethod
    def optimizer_class(self) -> type[MeanFieldOptimizer]:
        """The optimizer that replaces the user's."""

    def set_own(self, **values: Any) -> None:
        """Set the hyperparameters that the algorithm adds to the shared ones.

        Args:
            **values: Their values by name; a value out of its range is a `HyperparameterError`.
        """
        self.optimizer_class.hyperparameters.check(values)
        self.group_defaults |= plain(values)

    @classmethod
    def presets(cls) -> dict[str, Preset]:
        """Published settings of this callback, by name."""
        return presets_of(cls.__name__)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> VariationalCallback:
        """Build the callback with published hyperparameters.

        In a config it is ``class_path: lightning_bayes.VOGNCallback.from_preset`` with the name among the ``init_args`` and
        overrides among the ``dict_kwargs``.

        Args:
            name: One of `presets`, such as ``"osawa2019-cifar10-resnet18"``.
            **overrides: Arguments that replace the preset's.

        Returns:
            The callback.
        """
        return cls(**{**find_preset(cls.__name__, name).arguments, **overrides})

    # -- the fit ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch the trainer."""
        super().setup(trainer, pl_module, stage)
        self.undo()
        self._seam.undo()
        self._resume, self.evaluation.has_seen_loss = ResumeGuard(), False
        self._seam.use_atomic_files(trainer)
        if stage == "fit":
            checks.check_training(trainer, pl_module)
            self._seam.patch_fit(
                trainer,
                after_setup=lambda: self._swap(trainer, pl_module),
                wrap_closure=lambda closure: self._wrap_closure(trainer, closure),
                load_checkpoint=self._resume.start(trainer.strategy, pl_module).load_checkpoint,
            )

    def _swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checks.check_training(trainer, pl_module)  # again: configure_model and other callbacks ran since
        kwargs = {**self.optimizer_kwargs, "prior": read_prior(self.optimizer_kwargs["prior"])}
        settings = SwapSettings(self.optimizer_class, self.lr, self.prior, self.group_defaults, kwargs, self._grafts)
        check_model_parallel(trainer, pl_module, self.linearized)
        self.optimizer = swap_optimizer(trainer, pl_module, settings)
        self._posterior.forget()
        self._ranks_agree = self._is_announced = False
        self._names = {param: name for name, param in pl_module.named_parameters()}
        self._resume.check_order(self._param_names(self.optimizer))
        self.after_swap(trainer, self.optimizer)

    def after_swap(self, trainer: Trainer, optimizer: MeanFieldOptimizer) -> None:
        """Prepare the new optimizer further; does nothing unless overridden."""

    def _wrap_closure(self, trainer: Trainer, closure: Closure) -> Closure:
        optimizer = trainer.strategy.optimizers[0]
        if not isinstance(optimizer, MeanFieldOptimizer):
            return closure
        set_num_data(trainer, optimizer, self.num_data, self.prior)
        self._resume.commit()  # also here: Lightning's tuner trains without callbacks
        # A batch size that the tuner tries has to leave memory for the updates that measure.
        optimizer.measures_always = self not in trainer.callbacks  # type: ignore[attr-defined]
        if not self._ranks_agree:
            ranks.require_agreement(trainer, optimizer, self.mc_samples)
            self._ranks_agree = True
        wrapped = MonteCarloClosure(closure, trainer, optimizer, ranks.noise_samples(trainer, self.mc_samples))
        is_first = trainer.fit_loop.epoch_loop.batch_idx == 0 and not optimizer.num_updates
        if is_first and self.num_data is None and trainer.world_size == 1:
            wrapped.watch = lambda captured: warn_of_other_examples(trainer, set().union(*captured.sizes.values()))
        return wrapped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of arguments that the checkpoint of a resumed run overrides."""
        self._resume.commit()
        if self.optimizer is None or not self.optimizer.num_updates:
            return
        kept, wanted = dict(self.optimizer.param_groups[0]), with_augmentation_factor(self.group_defaults, trainer)
        if cycles_momentum(config.scheduler for config in trainer.strategy.lr_scheduler_configs):
            del wanted["betas"]  # a scheduler changes them all the time
        self.optimizer.defaults["num_data"] = kept["num_data"]
        wanted["noisy"], wanted["noise_seed"] = self.optimizer_class.noisy, self.seed
        wanted["num_data"] = self.num_data or infer_num_data(trainer)
        if self.prior.precision is not None:
            wanted["prior_precision"] = self.prior.precision
        if not self._states_interval:
            del wanted["curvature_interval"]
        if wanted["antithetic"] is None:
            del wanted["antithetic"]
        if self.default_noise is not None:
            del wanted["relative_noise"], wanted["noise_flatness"]  # set once the loss is known
        if "lr" in self._resume.saved and not callable(self.lr):
            kept["lr"], wanted["lr"] = self._resume.saved["lr"], self.lr  # the group's follows the user's schedule
        self._resume.warn_of_changes(kept, wanted)
        warn_of_another_prior(self.optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the noise scale of later updates, now that the loss and the trained layers are known.

        All passes of one update have the same scale, however its examples are spread over batches.
        """
        if self.optimizer is None or not (self.evaluation.has_seen_loss and trainer.global_step):
            return
        if self.default_noise is not None:
            self.default_noise.apply(self.optimizer, self.evaluation.link_of(pl_module))
        if not self._is_announced:
            self._is_announced, link = True, self.evaluation.link_of(pl_module)
            rank_zero_info(summary.at_the_start(self.optimizer, type(self).__name__, link, self.eval_samples))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the number of parameters that the data determine, and the number of skipped updates."""
        if self.optimizer is None or trainer.barebones:
            return
        if isinstance(trainer.strategy, BayesDDPStrategy) and trainer.strategy.reduced_bytes is not None:
            pl_module.log("distributed/reduced_mib", trainer.strategy.reduced_bytes / 2**20, sync_dist=True)
        if self.optimizer.noisy:
            pl_module.log(
                "posterior/effective_parameters", float(self.optimizer.effective_parameters()), sync_dist=True
            )
        pl_module.log("posterior/skipped_updates", float(self.optimizer.skipped_steps), sync_dist=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require finite weights and state, which the next pass would have checked, and sum the fit up."""
        if self.optimizer is None:
            return
        self.optimizer.require_finite()
        if self.optimizer.noisy and self.optimizer.num_updates:
            rank_zero_info(summary.at_the_end(self.optimizer, type(self).__name__))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the posterior for tests and predictions in this process."""
        if self.optimizer is not None and self.optimizer.num_updates and self._has_samples():
            self._posterior.keep(self.optimizer)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _has_samples(self) -> bool:
        return max(self.eval_samples, self.val_samples or 0) > 0 and self.optimizer_class.noisy

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """Find the posterior to evaluate under.

        Returns:
            Weight samples; None where there is no posterior.
        """
        count = sample_count(trainer, self.eval_samples, self.val_samples)
        if not count or not self.optimizer_class.noisy:
            return None
        posterior = self._posterior.find(trainer, pl_module, self.optimizer, type(self).__name__)
        if posterior is None:
            return None
        samples = PosteriorSamples(posterior.to(pl_module.device), count, self.seed)
        return LinearizedSamples(samples) if self.linearized else samples

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """One key for the family and for any arguments, so that a run can be resumed with other arguments."""
        return CALLBACK_KEY

    def state_dict(self) -> dict[str, Any]:
        """Names of the optimizer's parameters in its order, which make its state a posterior; link; learning rate."""
        if self.optimizer is None:
            return {}
        return {
            "format": 1,
            "param_names": self._param_names(self.optimizer),
            "link": self.evaluation.loss_link,
            "lr": None if callable(self.lr) else self.lr,
        }

    def _param_names(self, optimizer: MeanFieldOptimizer) -> list[list[str]]:
        return [[self._names[param] for param in group["params"]] for group in optimizer.param_groups]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the mean even if the save comes from inside a pass, such as from a signal handler.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: Contents of the checkpoint; changed in place. If an update has overflowed, a `NonFiniteError` is
                raised and no file is written.
        """
        if self.optimizer is not None:
            self.optimizer.require_finite()
        mean = self.optimizer.sampled_mean() if self.optimizer is not None else {}
        if mean:
            require_outside_of_pass(trainer)
        for name, param in pl_module.named_parameters(remove_duplicate=False):
            if param in mean and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = mean[param]
        use_plain_numbers(checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that a run can be resumed, or take the posterior for evaluation.

        Args:
            trainer: The trainer.
            pl_module: The module.
            checkpoint: Contents of the checkpoint.
        """
        if trainer.state.fn == "fit":
            self._resume.read(checkpoint, type(self).__name__)
        else:
            self.take_posterior(complete_checkpoint(trainer, checkpoint))

    def take_posterior(self, checkpoint: dict[str, Any]) -> None:
        """Evaluate under the posterior of a checkpoint.

        Args:
            checkpoint: Contents of a Lightning checkpoint.
        """
        self.evaluation.loss_link = callback_state(checkpoint).get("link")
        self._posterior.load(checkpoint)

    # -- the end ------------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Undo the patches of the fit; a resumed run that has not started gives the module its old weights back."""
        super().undo()
        self._seam.undo_fit()
        self._resume.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo all patches."""
        super().teardown(trainer, pl_module, stage)
        self._seam.undo()
