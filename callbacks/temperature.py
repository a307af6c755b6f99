"""Temperature scaling on the validation set, for a point estimate or a sampled posterior."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_bayes.callbacks.arguments import checked
from lightning_bayes.callbacks.evaluation import FinishesSamples
from lightning_bayes.callbacks.loaders import ValidationSet, sum_over_processes
from lightning_bayes.callbacks.patches import Patches
from lightning_bayes.callbacks.step_outputs import StepOutputs, concatenated, require_classes, step_outputs
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import TEMPERATURE, ScaledModule, fit_temperature
from lightning_bayes.predictive.temperature import LARGEST, SMALLEST


@final
class TemperatureScaling(Callback):
    """Fits the temperature that minimises the NLL of the validation set (see `lightning_bayes.predictive.temperature`).

    Each validation ends with a new temperature, logged as ``val/temperature``, from the logits that the validation step
    returned. The checkpoint keeps the temperature of its weights. In a test, the module logs metrics of the scaled
    prediction under ``test/post/``, in addition to the metrics of the unscaled prediction. Predictions are scaled too. If
    the checkpoint has no temperature, or the trainer has a `PosteriorScale`, `Calibration` or `MultiModeCallback`, the
    validation set is evaluated first. Its logits are held in memory, ``[samples, examples, classes]``.

    The module's ``validation_step`` must return ``{"outputs": logits, "targets": classes}``, and the module must use its
    attribute ``temperature``; `lightning_bayes.zoo.BayesClassifier` does both.

    Args:
        refit: Whether to fit before each test or prediction even if the checkpoint has a temperature, such as for another
            number of samples.
    """

    @checked
    def __init__(self, refit: bool = False) -> None:
        self.refit = refit
        self.temperature: float | None = None  # for the current weights
        self._patches = Patches()
        self._steps: list[StepOutputs] = []
        self._validation = ValidationSet(
            type(self).__name__, "temperature", "lightning_bayes.predictive.fit_temperature"
        )

    def state_dict(self) -> dict[str, Any]:
        """The temperature of the weights in the checkpoint."""
        return {"temperature": self.temperature}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's temperature."""
        self.temperature = state_dict["temperature"]

    # -- during a fit -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require a validation set."""
        self._validation.require(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discard the temperature, which this update invalidates."""
        self.temperature = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the logits of an interrupted validation, and keep the loaders."""
        self._steps = []
        self._validation.keep(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the logits of the first validation loader."""
        if dataloader_idx == 0:
            step = step_outputs(pl_module, "validation_step", outputs)  # also in the sanity check, before training
            require_classes(pl_module, "validation_step", step)
            if not trainer.sanity_checking:
                self._steps.append(step)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit and log the temperature."""
        if self._steps and not trainer.sanity_checking:
            self._fit(trainer, pl_module, concatenated(self._steps))
            self._steps = []
            pl_module.log("val/temperature", float(self.temperature or 1.0), sync_dist=True)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the module's logits; fit the temperature first if there is none."""
        if not isinstance(pl_module, ScaledModule):
            raise UnsupportedTrainingError(
                "TemperatureScaling sets a module's lightning_bayes_temperature and calls its sampled_forward, but "
                f"{type(pl_module).__name__} lacks them (see lightning_bayes.predictive.ScaledModule). Use "
                "lightning_bayes.zoo.BayesClassifier, or call lightning_bayes.predictive.fit_temperature yourself."
            )
        # Validation during the fit did not use the width or the number of modes that another callback has chosen.
        has_width = any(isinstance(callback, FinishesSamples) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if self.temperature is None or self.refit or has_width:
            loader = self._validation.loader(trainer)
            self._fit(
                trainer, pl_module, self._validation.outputs(trainer, pl_module, pl_module.sampled_forward, loader)
            )
            rank_zero_info(
                f"The temperature {self.temperature:.4f} was fitted on the validation set before this evaluation."
            )
        self._patches.set(pl_module, TEMPERATURE, self.temperature)

    on_predict_epoch_start = on_test_epoch_start

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop scaling."""
        self._patches.undo()

    on_predict_end = on_test_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop scaling."""
        self._patches.undo()

    def _fit(self, trainer: Trainer, pl_module: LightningModule, validation: StepOutputs) -> None:
        self.temperature = fit_temperature(*validation, sum_over_processes(trainer, pl_module))
        if not SMALLEST * 1.01 < self.temperature < LARGEST / 1.01:
            rank_zero_warn(
                f"The temperature {self.temperature:.3g} is at the end of the search range from {SMALLEST} to {LARGEST}: "
                "the validation set does not determine it, for example because every example is classified correctly."
            )
