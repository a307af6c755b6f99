"""Variational inference on an unmodified LightningModule: the base class of the callbacks.

A fit takes these steps:

1. `setup` patches the trainer.
2. `_set_up_and_swap` replaces the user's optimizer, after Lightning has set it up and before it restores a checkpoint.
3. One `MonteCarloClosure` replaces Lightning's closures and runs each batch under weight samples; `FirstLoss` records once.
4. `on_train_batch_end` sets the default noise scale once the first loss is known; `_start_epoch` may move it.
5. Evaluation averages predictions over posterior samples (`find_samples`).
6. Checkpoints hold the posterior mean as weights, and the optimizer's state as the posterior.
7. `undo` removes the patches, also after an exception; the plugin for checkpoint files stays until Lightning tears it down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Signature
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import Never, Unpack

from lightning_bayes.callbacks.calibration import beside, calibration_of
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback
from lightning_bayes.callbacks.evaluation.evaluated_posterior import EvaluatedPosterior, sample_count
from lightning_bayes.callbacks.fit import summary
from lightning_bayes.callbacks.fit.checkpoint_io import store_mean, use_atomic_files, use_plain_numbers
from lightning_bayes.callbacks.fit.closure import MonteCarloClosure
from lightning_bayes.callbacks.fit.fields import CallbackFields, complete_arguments, documented, shared_help
from lightning_bayes.callbacks.fit.noise_rule import NoiseRule
from lightning_bayes.callbacks.fit.num_data import check_example_count, set_num_data, warn_of_strong_prior
from lightning_bayes.callbacks.fit.presets import Preset, find_preset, presets_of
from lightning_bayes.callbacks.fit.resume import param_names, refuse_other_posterior, resumable_state, warn_of_changes
from lightning_bayes.callbacks.fit.swap import swap_optimizer
from lightning_bayes.callbacks.trainer import checks
from lightning_bayes.callbacks.trainer.last_epoch import fit_kept
from lightning_bayes.callbacks.trainer.loaders import sum_over_processes
from lightning_bayes.callbacks.trainer.neighbours import is_missing
from lightning_bayes.callbacks.trainer.private_lightning import wrap_closures
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.default_noise import DefaultNoise, follows_fit
from lightning_bayes.optim.parameters import names_of
from lightning_bayes.optim.readout import CALLBACK_KEY, callback_state
from lightning_bayes.optim.schedules import Schedule
from lightning_bayes.predictive import LinearizedSamples, PosteriorSamples, Samples


class VariationalCallback(EvaluationCallback, ABC):
    """Turns training of an unmodified LightningModule into variational inference.

    All arguments are keyword arguments. Numbers may be schedules: functions of the number of updates, such as
    `lightning_bayes.LinearSchedule`.

    Class attributes:
        optimizer_class: The optimizer that replaces the user's.
        field_defaults: Defaults of the callback that differ from the optimizer's.

    Args:
        *unnamed: Refused, with the keyword that was probably meant.
        **fields: See `CallbackFields`.

    Attributes:
        arguments: The arguments, with defaults filled in.
        optimizer: The optimizer that has replaced the user's; None before a fit.

    Raises:
        HyperparameterError: If an argument is out of range.
        TypeError: If an argument has no name, or an unknown one.
    """

    field_defaults: ClassVar[Mapping[str, Any]] = {}
    __signature__: ClassVar[Signature]

    def __init__(self, *unnamed: Never, **fields: Unpack[CallbackFields]) -> None:
        self.arguments = arguments = complete_arguments(
            self.name, self.optimizer_class, fields, self.field_defaults, unnamed
        )
        super().__init__(arguments.link)
        self._noise = DefaultNoise(arguments.group_defaults["noise_flatness"]) if arguments.is_default_noise else None
        self._rule = NoiseRule()
        self.linearized, self.predict_once = arguments.linearized, arguments.predict_once
        calibrates = arguments.lr is None or arguments.calibrate  # the papers' step is left as it is
        self._calibration = calibration_of(self.name, arguments.calibrate) if calibrates else None
        self.eval_samples, self.val_samples = arguments.eval_samples, arguments.val_samples
        self.group_defaults, self.optimizer_kwargs = arguments.group_defaults, arguments.optimizer_kwargs
        self.mc_samples: int = self.optimizer_kwargs["mc_samples"]
        self.seed: int = self.optimizer_kwargs["seed"]
        self.optimizer: VariationalOptimizer | None = None
        self._resumed: dict[str, Any] = {}  # the callback's state in the checkpoint that the fit resumes from
        self._posterior = EvaluatedPosterior()
        self._ranks_agree = self._is_announced = self._classifies = self._follows_fit = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if isinstance(cls.optimizer_class, type):
            cls.__signature__ = documented(cls, cls.optimizer_class, cls.field_defaults)

    @property
    @abstractmethod
    def optimizer_class(self) -> type[VariationalOptimizer]:
        """The optimizer that replaces the user's."""

    @property
    def lr(self) -> float | Schedule | None:
        """α of the algorithm's own step; None if the user's optimizer sets the step."""
        return self.arguments.lr

    @property
    def num_data(self) -> int | None:
        """N as passed; None if the fit infers it."""
        return self.arguments.num_data

    @property
    def name(self) -> str:
        """Name of the callback's class, for messages."""
        return type(self).__name__

    @classmethod
    def presets(cls) -> dict[str, Preset]:
        """Published settings of this callback, by name."""
        return presets_of(cls.__name__)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> VariationalCallback:
        """Build the callback with published hyperparameters.

        In a config, set ``class_path: lightning_bayes.VOGNCallback.from_preset``, pass the name in ``init_args`` and
        overrides in ``dict_kwargs``.

        Args:
            name: One of `presets`, such as ``"osawa2019-cifar10-resnet18"``.
            **overrides: Arguments that replace the preset's.

        Returns:
            The callback.
        """
        return cls(**{"calibrate": False, **find_preset(cls.__name__, name).arguments, **overrides})

    # -- the fit ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch the trainer."""
        super().setup(trainer, pl_module, stage)
        beside(trainer, self, self._calibration)
        use_atomic_files(trainer)
        if stage == "fit":
            checks.check_training(trainer, pl_module)
            self._resumed = {}
            self._rule = NoiseRule()
            # The tuner trains without callbacks. A batch size that it accepts must leave memory for updates that measure.
            is_tuned, start_epoch = partial(is_missing, trainer, self), partial(self._start_epoch, trainer)
            closure = MonteCarloClosure(trainer, self.mc_samples, start_epoch, is_tuned)
            swap = partial(self._set_up_and_swap, trainer.strategy.setup_optimizers, pl_module, closure)
            self._patches.set(trainer.strategy, "setup_optimizers", swap)
            wrap_closures(trainer, closure.of_batch, self._patches)

    def _set_up_and_swap(
        self,
        set_up: Callable[[Trainer], None],
        pl_module: LightningModule,
        closure: MonteCarloClosure,
        trainer: Trainer,
    ) -> None:
        """Replacement of the strategy's `setup_optimizers`: runs it and replaces the user's optimizer."""
        set_up(trainer)
        checks.check_training(trainer, pl_module)  # again: configure_model and other callbacks ran since
        self.optimizer = swap_optimizer(trainer, pl_module, self.arguments, self._patches)
        self._posterior = EvaluatedPosterior()  # discard the previous fit's posterior
        self._ranks_agree = self._is_announced = False
        closure.use(self.optimizer)

    def _start_epoch(self, trainer: Trainer, closure: MonteCarloClosure) -> None:
        """Set N and the noise scale of an epoch; before a fit's first batch, require that its processes agree."""
        optimizer, module = self.optimizer, trainer.lightning_module
        assert optimizer is not None  # the strategy sets optimizers up before the first batch
        optimizer.start_groups()
        begins = trainer.fit_loop.epoch_loop.batch_idx == 0
        if begins and self._noise and self.compares_validations(module):
            self._rule.start_epoch(sum_over_processes(trainer, module))
            if self._rule.path:
                self._noise.apply(optimizer, True, self._rule.share)  # only that of a classifier follows
        if begins or optimizer.posterior_defaults["num_data"] is None:  # loaders are reloaded, and data sets grow
            set_num_data(trainer, optimizer, self.num_data)
        if not self._ranks_agree:
            checks.require_agreement(trainer, optimizer, self.mc_samples)
            self._ranks_agree = True
        if begins and self.num_data is None and not optimizer.num_updates and trainer.world_size == 1:
            closure.on_first_capture = partial(check_example_count, trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn about arguments that the checkpoint of a resumed run overrides."""
        if self.optimizer is not None and self.optimizer.num_updates:
            warn_of_changes(trainer, self.optimizer, self.arguments, self._resumed)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the comparison of the validation, and its NLL for the default noise."""
        super().on_validation_epoch_end(trainer, pl_module)
        if self.validated is not None and self.validated.has_classes:
            self._rule.add_validation(self.validated.scores["cls/NLL"].second)

    def compares_validations(self, module: LightningModule) -> bool:
        """Whether the default noise follows the NLL."""
        return self._noise is not None and follows_fit(module, self.likelihood_of(module).classifies)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the default noise scale of later updates, now that the loss and the trained layers are known."""
        if self.optimizer is None or not self.optimizer.num_updates:
            return
        known = None if self._is_announced else self.likelihood_of(pl_module)
        self._classifies = self._classifies if known is None else known.classifies
        if self._noise is not None:
            self._noise.apply(self.optimizer, self._classifies, self._rule.share)
        if known is not None:
            self._is_announced, self._follows_fit = True, self.compares_validations(pl_module)
            self.optimizer.notes.likelihood = self.loss_likelihood.state()
            warn_of_strong_prior(self.optimizer)
            rank_zero_info(summary.at_the_start(self.optimizer, self.name, known, self.eval_samples, self._follows_fit))
        if self._follows_fit:
            self._rule.add(outputs, trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the effective number of parameters, and the number of skipped updates."""
        if self.optimizer is not None and not trainer.barebones:
            pl_module.log_dict(summary.epoch_metrics(trainer, self.optimizer), sync_dist=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require finite weights and state, and that no step has replaced a trained layer; the module may do so now."""
        if self.optimizer is not None:
            self.optimizer.require_finite()  # the last update has no later pass that checks it
            if self.optimizer.noisy:
                names_of(self.optimizer.model, [param for _, param in self.optimizer.trained()])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the posterior for later evaluation in this process, and summarise the fit."""
        if self.optimizer is None or not self.optimizer.num_updates:
            return
        evaluates_samples = self.optimizer_class.noisy and max(self.eval_samples, self.val_samples or 0) > 0
        with fit_kept(self.name, "the posterior of its module"):
            if evaluates_samples:
                self._posterior.keep(self.optimizer)
            if self.optimizer.noisy:
                rank_zero_info(summary.at_the_end(self.optimizer, self.name, self.validated, self._rule.path))

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """Samples of the posterior; None without a posterior, and if the number of samples is 0."""
        count = sample_count(trainer, self.eval_samples, self.val_samples)
        if not count or not self.optimizer_class.noisy:
            return None
        posterior = self._posterior.find(trainer, pl_module, self.optimizer, self.name)
        if posterior is None:
            return None
        samples = PosteriorSamples(posterior.to(pl_module.device), count, self.seed)
        return LinearizedSamples(samples) if self.linearized else samples

    # -- checkpoints --------------------------------------------------------------------------------------------------

    state_key = CALLBACK_KEY  # the same for all callbacks and arguments, so that a run can resume with other arguments

    def state_dict(self) -> dict[str, Any]:
        """Parameter names in the optimizer's order, needed to read its state as a posterior; the link; the learning rate."""
        if self.optimizer is None:
            return {}
        return {
            "param_names": param_names(self.optimizer, self.name),
            **self.loss_state(),
            "lr": None if callable(self.lr) else self.lr,
            "noise_rule": self._rule.state(),
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the posterior mean, even if the save comes from inside a pass, such as from a signal handler.

        Raises `NonFiniteError`, before a file is written, if an update has overflowed.
        """
        if self.optimizer is not None:
            self.optimizer.require_finite()
            store_mean(checkpoint, pl_module, self.optimizer.stashed_means())
        use_plain_numbers(checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that a fit can resume from the checkpoint, or load its posterior for evaluation."""
        if trainer.state.fn == "fit":
            self._resumed = resumable_state(checkpoint, self.name)
            self.load_loss_state(self._resumed)
            self._rule.load(self._resumed.get("noise_rule"))
            self.loss_is_known = checkpoint["global_step"] > 0
            return
        refuse_other_posterior(checkpoint, self.name)
        self.load_loss_state(callback_state(checkpoint))
        self._posterior.load(checkpoint)


VariationalCallback.__init__.__doc__ = shared_help()  # what help and editors show for callbacks without own arguments
