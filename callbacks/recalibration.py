"""Re-estimates BatchNorm statistics on training batches before validation, test or prediction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.loaders import OnDevice, mean_over_processes, random_state_kept, training_loader
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.callbacks.trainer.private_lightning import training_batches
from lightning_bayes.callbacks.trainer.training_inputs import EXAMPLES, TrainingInputs, examples_of, runs_of
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive import Samples, recalibrate
from lightning_bayes.predictive.recalibration import running_statistics
from lightning_bayes.predictive.repeated import Repeatable


@final
class BatchNormRecalibration(Callback):
    """Estimates BatchNorm statistics for each weight sample in validation, test and prediction.

    For each sample that another callback averages over, the running statistics are re-estimated as a plain average over B
    training batches; predictions at the mean use statistics of the mean. The module's original statistics are restored
    afterwards. This costs up to ``(S + 1) · B`` forward passes at the start, or ``B`` with ``of="mean"``. Validation during
    a fit uses the statistics collected in training, which checkpoints keep; a calibration at its end uses
    those of the samples, from the first batches of the last epoch.

    Args:
        batches: B, from the training loader of the data module, of the module, or of the last fit with this callback. None:
            as many as hold 512 examples, which do as well as a pass over the training set (docs/defaults.md).
        of: ``"sample"`` estimates statistics for each sample; ``"mean"`` estimates them at the mean, for all samples.
        seed: Seed of the shuffling and augmentation of these batches; the global random state is restored.

    Raises:
        HyperparameterError: If `batches` is not a whole number of at least 1, or `of` is unknown.
    """

    @checked
    def __init__(self, batches: int | None = None, of: Literal["sample", "mean"] = "sample", seed: int = 0) -> None:
        if batches is not None and (batches < 1 or batches != int(batches)):
            raise HyperparameterError(f"batches={batches!r} must be a whole number of at least 1.")
        if of not in {"sample", "mean"}:
            raise HyperparameterError(f"of={of!r} is unknown; choose 'sample' or 'mean'.")
        self.batches, self.of, self.seed = batches, of, seed
        self._was_used = False
        self._fitted_on: Any = None  # training loader of the last fit; the trainer forgets it in a test
        self._seen = TrainingInputs(batches)  # for a calibration at the end of the fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the warning of `teardown`."""
        self._was_used = stage == "fit"

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the training loaders, which may be those of this epoch alone."""
        self._fitted_on = training_batches(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the first batches of an epoch."""
        self._seen.add(batch, batch_idx)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Warn if there was nothing to recalibrate."""
        self._seen.batches = []
        if not self._was_used:
            rank_zero_warn(
                "BatchNormRecalibration changed nothing: no callback averaged over samples. For a point estimate, call "
                "torch.optim.swa_utils.update_bn(train_loader, module) before the evaluation."
            )

    def recalibrated(self, trainer: Trainer, pl_module: LightningModule, samples: Samples) -> Samples:
        """The samples with statistics of their own; the module is in evaluation mode."""
        self._was_used = True
        if not running_statistics(pl_module):
            rank_zero_warn(
                f"BatchNormRecalibration: no BatchNorm of {type(pl_module).__name__} has running statistics."
            )
            return samples
        amount = f"{EXAMPLES} training examples" if self.batches is None else f"{self.batches} training batches"
        rank_zero_info(f"BatchNorm statistics of the {self.of} are estimated on {amount}.")
        with random_state_kept(pl_module):
            torch.manual_seed(self.seed)
            return recalibrate(
                pl_module, samples, self._runs(trainer, pl_module), self.of, mean_over_processes(trainer)
            )

    def _runs(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[Repeatable]:
        """In a fit the batches that it has seen, else those of its loader."""
        if trainer.state.fn == "fit":
            return self._seen.runs(trainer, pl_module)
        return runs_of(trainer, pl_module, self._loaded(trainer, pl_module))

    def _loaded(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[Any]:
        loader = training_loader(trainer, pl_module, self._fitted_on, type(self).__name__)
        examples = 0
        for batch in islice(OnDevice(trainer, loader, RunningStage.TRAINING), self.batches):
            yield batch
            examples += examples_of(batch)
            if self.batches is None and examples >= EXAMPLES:
                return


def recalibrated(trainer: Trainer, pl_module: LightningModule, samples: Samples) -> Samples:
    """The samples with BatchNorm statistics of their own; unchanged without a `BatchNormRecalibration`."""
    callbacks = callbacks_of(trainer, BatchNormRecalibration)
    if not callbacks:
        return samples
    return callbacks[-1].recalibrated(trainer, pl_module, samples)


def recalibrated_examples(trainer: Trainer, module: LightningModule) -> int:
    """About how many examples `recalibrated` runs under each sample."""
    is_used = callbacks_of(trainer, BatchNormRecalibration) and running_statistics(module)
    return EXAMPLES if is_used else 0
