"""What the end of a fit finds on its validation rows: a temperature, a width, and what averaging over samples changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.callbacks.calibrating.batch_norm_means import BatchNormMeans
from lightning_bayes.callbacks.calibrating.held_out import (
    HeldOut,
    Scalable,
    agreed,
    budget_of_fit,
    compared,
    kept_rows,
    mismatch,
)
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback
from lightning_bayes.callbacks.evaluation.evaluated_posterior import FEW_SAMPLES
from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison
from lightning_bayes.callbacks.evaluation.spread import distinct_sum
from lightning_bayes.callbacks.evaluation.validation_rows import KeptRows, rows_of
from lightning_bayes.callbacks.trainer.loaders import ValidationSet
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.predictive import Calibration as Chosen
from lightning_bayes.predictive import ClosedFormSamples, Link, PosteriorSamples, Samples, choose_calibration
from lightning_bayes.predictive.calibration import CLASS_LINKS, EVALUATIONS

FEWEST_ROWS: Final = 200  # where the choice was asked for and the validation set has as many


def is_trial(trainer: Trainer) -> bool:
    """Whether a fit is a trial, or is not validated."""
    trial = trainer.fast_dev_run or trainer.overfit_batches  # type: ignore[attr-defined]
    return bool(trial) or not sum(trainer.num_val_batches)


def is_calibrated(link: Link | None) -> bool:
    """Whether a fit may be a classifier's."""
    return link in {None, *CLASS_LINKS}


class Choice(NamedTuple):
    """The result of a choice."""

    samples: Samples
    rows: int  # that it was made on
    tries_widths: bool
    chosen: Chosen | None  # None if it only compares
    comparison: Comparison | None = None  # None for real-valued targets

    def line(self, seconds: float, seconds_of_fit: float, asks_width: bool) -> str:
        """What was chosen, and in what time."""
        found = self.chosen
        assert found is not None
        width = " and width 1 (no other was tried)" if asks_width and isinstance(self.samples, Scalable) else ""
        width = f" and width {found.scale:.3g}" if self.tries_widths else width
        share = f", {seconds / seconds_of_fit:.1%} of the fit" if seconds_of_fit > 0 else ""
        return (
            f"temperature {found.temperature:.3g}{width}, chosen on {self.rows:,} validation examples. Their NLL is "
            f"{found.nll:.4f} instead of {found.nll_before:.4f}, {found.nll - found.nll_before:+.4f} ± "
            f"{found.standard_error:.4f}. It took {seconds:.1f} s{share}."
        )


class Chooser(NamedTuple):
    """Chooses on validation rows.

    Attributes:
        width: Whether to choose a width, where the fit can afford it.
        temperature: Whether to choose a temperature.
        is_required: Whether to choose on `FEWEST_ROWS` at least, whatever the fit can afford.
    """

    trainer: Trainer
    module: LightningModule
    callback: EvaluationCallback
    validation: ValidationSet
    link: Link | None
    width: bool
    temperature: bool
    is_required: bool

    def at_end(self, samples: Samples, kept: KeptRows, inputs: BatchNormMeans) -> Choice | str | None:
        """Choose at the end of a fit; why it is impossible in some process; None if the fit was too short."""
        trainer, module = self.trainer, self.module
        obstacle = self._obstacle(kept)
        is_impossible = agreed(trainer, module, bool(obstacle))
        if not is_impossible:
            samples, batches, width = self._affordable(samples, kept)
            if not batches:
                return None
            inputs.find(trainer, module, samples)
            samples, at = inputs.centred(samples, module), HeldOut(trainer, module, self.validation, batches)
            outputs_at, targets, obstacle = self._tried(at, samples)
            is_impossible = agreed(trainer, module, bool(obstacle))
        if is_impossible:
            return obstacle or "another process cannot"
        found = self.chosen(outputs_at, targets, width) if self.temperature else None
        outputs, temperature = outputs_at(found.scale if found else 1.0), found.temperature if found else 1.0
        return Choice(samples, at.rows, width, found, self._compared(at, samples, outputs, targets, temperature))

    def chosen(self, outputs_at: Callable[[float], Tensor], targets: Tensor, width: bool = False) -> Chosen:
        """Choose by the outputs at each width."""
        likelihood = getattr(self.module, "lightning_bayes_likelihood", None)
        std, reduce = (
            likelihood.std if isinstance(likelihood, Gaussian) else None,
            distinct_sum(self.trainer, self.module),
        )
        return choose_calibration(outputs_at, targets, self.link or "identity", std, reduce, width)

    def _compared(
        self, at: HeldOut, samples: Samples, outputs: Tensor, targets: Tensor, temperature: float
    ) -> Comparison | None:
        """Compare a classifier's samples with the network alone; each has the temperature that these rows choose for it."""
        if self.link not in CLASS_LINKS or samples.count == 1:
            return None
        alone, beside = at.alone(samples).outputs, "the mean" if samples.has_mean else "the network alone"
        if self.temperature:
            own = self.chosen(lambda scale: alone, targets).temperature
            alone, beside = alone / own, f"{beside}, each with a temperature of its own from the same rows"
        reduce = distinct_sum(self.trainer, self.module)
        return compared(outputs / temperature, alone, targets, self.link, reduce, beside)

    def _obstacle(self, kept: KeptRows) -> str:
        """Why the task is not known; empty if it is."""
        if self.link is None:
            return "the training loss does not tell how outputs become predictions"
        if kept.other is not None:
            return f"the set yields a {kept.other} instead of pairs (inputs, targets)"
        return self.callback.obstacle

    def _affordable(self, samples: Samples, kept: KeptRows) -> tuple[Samples, list[Any], bool]:
        """Samples and batches that the fit can afford, none after a short one; and whether it can afford to try widths."""
        trainer, module, seen = self.trainer, self.module, sum(map(rows_of, kept.batches))
        size = self.callback.batch_rows or max(map(rows_of, kept.batches), default=0)
        budget, enough = budget_of_fit(trainer, module, size), min(FEWEST_ROWS, agreed(trainer, module, seen))
        if budget.rows(samples.count) < enough and isinstance(samples, PosteriorSamples) and not self.is_required:
            samples = PosteriorSamples(samples.posterior, min(FEW_SAMPLES, samples.count), samples.seed)
        width = self.width and isinstance(samples, Scalable)
        width &= self.link == "identity" or 1.5 * budget.rows(samples.count, EVALUATIONS) >= enough
        calls = FEW_SAMPLES if isinstance(samples, ClosedFormSamples) else samples.count  # it calls the network once
        rows, most = budget.rows(calls, EVALUATIONS if width else 1), budget.batches(calls)
        if self.is_required:
            rows, most = max(rows, FEWEST_ROWS), max(most, len(kept.batches))
        return samples, kept_rows(module, kept.batches, rows, size, most), width

    def _tried(self, at: HeldOut, samples: Samples) -> tuple[Any, Any, str]:
        """Outputs at each width, targets, and why they are no logits of the targets; the last is empty if they are."""
        try:
            first, outputs_at = at.at_widths(samples)
        except Exception as error:  # of the user's network, which a fit without calibration does not call here
            if isinstance(error, Warning) or self.is_required:  # the user asked for an error
                raise
            return None, None, f"{type(error).__name__}: {error}".rstrip(".")
        is_of_classes = self.link in CLASS_LINKS
        return outputs_at, first.targets, mismatch(first, self.link or "identity") if is_of_classes else ""
