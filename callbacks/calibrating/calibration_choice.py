"""What the end of a fit finds on its validation rows: a temperature, a width, and what averaging over samples changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.callbacks.calibrating.batch_norm_means import BatchNormMeans
from lightning_bayes.callbacks.calibrating.held_out import HeldOut, Scalable, agreed, budget_of_fit, kept_rows
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback
from lightning_bayes.callbacks.evaluation.evaluated_posterior import FEW_SAMPLES
from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison, Pairs
from lightning_bayes.callbacks.evaluation.spread import distinct_sum
from lightning_bayes.callbacks.evaluation.validation_rows import KeptRows, rows_of
from lightning_bayes.callbacks.trainer.stated_likelihood import LIKELIHOOD_ATTRIBUTE
from lightning_bayes.likelihood import Gaussian, Likelihood, OutputLikelihood, Raw
from lightning_bayes.predictive import Calibration as Chosen
from lightning_bayes.predictive import ClosedFormSamples, PosteriorSamples, Samples, choose_calibration
from lightning_bayes.predictive.calibration import EVALUATIONS

FEWEST_ROWS: Final = 200  # where the choice was asked for and the validation set has as many


def is_trial(trainer: Trainer) -> bool:
    """Whether a fit is a trial, or is not validated."""
    trial = trainer.fast_dev_run or trainer.overfit_batches  # type: ignore[attr-defined]
    return bool(trial) or not sum(trainer.num_val_batches)


def may_classify(likelihood: Likelihood) -> bool:
    """Whether a fit may be a classifier's."""
    kinds = [scored.kind for scored in likelihood.outputs]
    return not kinds or any(kind.has_temperature or isinstance(kind, Raw) for kind in kinds)


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
    width: bool
    temperature: bool
    is_required: bool

    @property
    def kind(self) -> OutputLikelihood:
        """The kind of the only output, with the noise that the module states."""
        stated, only = getattr(self.module, LIKELIHOOD_ATTRIBUTE, None), self.callback.likelihood_of(self.module).only
        kind = Gaussian() if only is None or isinstance(only.kind, Raw) else only.kind
        return stated if isinstance(stated, Gaussian) and not kind.has_temperature else kind

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
            samples = inputs.centred(samples, module)
            at, outputs_at, obstacle = self._tried(samples, batches)
            is_impossible = agreed(trainer, module, bool(obstacle))
        if is_impossible:
            return obstacle or "another process cannot"
        found = self.chosen(at, outputs_at, width) if self.temperature else None
        outputs, temperature = outputs_at(found.scale if found else 1.0), found.temperature if found else 1.0
        return Choice(samples, at.rows, width, found, self._compared(at, samples, outputs, temperature))

    def before_evaluation(self, samples: Samples, batches: list[Any]) -> Choice:
        """Choose before an evaluation of a checkpoint."""
        width = self.width and isinstance(samples, Scalable)
        at = self._held_out(batches)
        return Choice(samples, at.rows, width, self.chosen(at, at.at_widths(samples), width))

    def chosen(self, at: HeldOut, outputs_at: Callable[[float], Tensor], width: bool = False) -> Chosen:
        """Choose by the outputs at each width."""
        targets, counted = at.labelled.targets, at.labelled.counted
        reduce = distinct_sum(self.trainer, self.module)
        return choose_calibration(outputs_at, targets, self.kind, counted=counted, reduce=reduce, width=width)

    def _held_out(self, batches: list[Any]) -> HeldOut:
        return HeldOut(self.trainer, self.module, self.callback.reader(self.module), batches)

    def _compared(self, at: HeldOut, samples: Samples, outputs: Tensor, temperature: float) -> Comparison | None:
        """Compare a classifier's samples with the network alone; each has the temperature that these rows choose for it."""
        kind = self.kind
        if not kind.has_temperature or samples.count == 1:
            return None
        alone, beside = at.alone(samples), "the mean" if samples.has_mean else "the network alone"
        if self.temperature:
            own = self.chosen(at, lambda scale: alone).temperature
            alone, beside = alone / own, f"{beside}, each with a temperature of its own from the same rows"
        pairs, values, counted = Pairs(has_classes=True), kind.class_probs(outputs / temperature), at.labelled.counted
        targets = at.labelled.targets.reshape(values.shape[1:-1])
        counted = None if counted is None else counted.reshape(targets.shape)
        pairs.add(values, kind.class_probs(alone)[0], targets, counted)
        return pairs.compute(distinct_sum(self.trainer, self.module), samples.count, beside)

    def _obstacle(self, kept: KeptRows) -> str:
        """Why the task is not known; empty if it is."""
        likelihood = self.callback.likelihood_of(self.module)
        if len(likelihood.outputs) > 1:
            return "the training loss scores several outputs"
        if likelihood.only is None or isinstance(likelihood.only.kind, Raw):
            return "the training loss does not tell how outputs become predictions"
        return "" if kept.other is None else f"the rows of its batches, each a {kept.other}, are not known"

    def _affordable(self, samples: Samples, kept: KeptRows) -> tuple[Samples, list[Any], bool]:
        """Samples and batches that the fit can afford, none after a short one; and whether it can afford to try widths."""
        trainer, module, seen = self.trainer, self.module, sum(map(rows_of, kept.batches))
        size = self.callback.batch_rows or max(map(rows_of, kept.batches), default=0)
        budget, enough = budget_of_fit(trainer, module, size), min(FEWEST_ROWS, agreed(trainer, module, seen))
        if budget.rows(samples.count) < enough and isinstance(samples, PosteriorSamples) and not self.is_required:
            samples = PosteriorSamples(samples.posterior, min(FEW_SAMPLES, samples.count), samples.seed)
        width = self.width and isinstance(samples, Scalable)
        width &= not self.kind.has_temperature or 1.5 * budget.rows(samples.count, EVALUATIONS) >= enough
        calls = FEW_SAMPLES if isinstance(samples, ClosedFormSamples) else samples.count  # it calls the network once
        rows, most = budget.rows(calls, EVALUATIONS if width else 1), budget.batches(calls)
        if self.is_required:
            rows, most = max(rows, FEWEST_ROWS), max(most, len(kept.batches))
        return samples, kept_rows(module, kept.batches, rows, size, most), width

    def _tried(self, samples: Samples, batches: list[Any]) -> tuple[Any, Any, str]:
        """The held-out rows, outputs at each width, and why they are no logits of the targets; empty if they are."""
        try:
            at = self._held_out(batches)
            outputs_at = at.at_widths(samples)
        except Exception as error:  # of the user's network, which a fit without calibration does not call here
            if isinstance(error, Warning) or self.is_required:  # the user asked for an error
                raise
            return None, None, f"{type(error).__name__}: {error}".rstrip(".")
        return at, outputs_at, at.mismatch(outputs_at(1.0)) if self.kind.has_temperature else ""
