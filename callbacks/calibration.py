"""Chooses the width of a trained posterior and a temperature on the validation set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.callbacks.arguments import checked
from lightning_bayes.callbacks.chosen_posterior import ChosenPosterior, OutputsAt, Reduce
from lightning_bayes.callbacks.loaders import OnDevice
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import Calibration as Chosen
from lightning_bayes.predictive import Link, choose_calibration
from lightning_bayes.predictive.calibration import EVALUATIONS

SHARE = 0.05  # of the passes of the fit
FEWEST_ROWS = 200  # also in a short fit
_PASSES_OF_A_STEP = 3  # forward and backward, in forward passes


@final
class Calibration(ChosenPosterior):
    """Chooses the width of the posterior and a temperature on the validation set: one of them, both or neither.

    ``calibrate=True`` of a callback such as `VOGNCallback` adds it. It works like `PosteriorScale`, with a short search, and
    for classifiers with a temperature that divides the logits of every sample. Something is changed only if the validation
    NLL falls by more than one standard error of the paired difference; see `lightning_bayes.calibrate`. Tests, validations
    and predictions outside of a fit use both numbers, for any module, and `load_posterior` returns them.

    It uses about five per cent of the passes of the fit, on validation examples that are spread over the set. If that is not
    enough for widths on 200 examples, it chooses a temperature only. The line at the end of the fit says what was chosen and
    how long it took.

    Args:
        linearized: Whether predictions are linearised, see `LinearizedSamples`; None follows the callback with the
            posterior.
        refit: Whether to choose again before each evaluation even if the checkpoint has a width, such as for another number
            of samples.

    Attributes:
        seconds: The time that the last choice took.
    """

    number = "width and temperature"

    @checked
    def __init__(self, linearized: bool | None = None, refit: bool = False) -> None:
        super().__init__(linearized, refit)
        self._rows_of_batch = 0  # of the fit
        self._start = self._start_of_fit = self.seconds = 0.0
        self._rows, self._tries_widths = 0, True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; see `ChosenPosterior`."""
        super().on_train_start(trainer, pl_module)
        self._start_of_fit = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the rows of a batch; see `ChosenPosterior`."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._rows_of_batch = max(self._rows_of_batch, rows_of(batch))

    def batches(self, trainer: Trainer, loader: Any, limit: int | None, count: int) -> Callable[[], Iterable[Any]]:
        """Some rows of the validation batches, loaded once."""
        self._start = time.perf_counter()
        steps = trainer.fit_loop.total_batch_idx + 1 if trainer.state.fn == "fit" else 0
        passes = SHARE * _PASSES_OF_A_STEP * steps * self._rows_of_batch if steps else math.inf
        rows = max(FEWEST_ROWS, int(passes / (EVALUATIONS * count)) if steps else 5 * FEWEST_ROWS)
        kept = thinned(OnDevice(trainer, loader, RunningStage.VALIDATING).loaded(), _length(loader, limit), rows)
        self._rows = sum(rows_of(batch) for batch in kept)
        self._tries_widths = self._rows * EVALUATIONS * count <= 1.5 * passes  # the rows are a rough number
        return lambda: kept

    def find(self, outputs_at: OutputsAt, link: Link, noise_std: float | None, reduce: Reduce) -> tuple[float, float]:
        """The width and the temperature of `choose_calibration`."""
        first = outputs_at(1.0)

        def outputs(scale: float) -> Tensor:
            return first.outputs if scale == 1 else outputs_at(scale).outputs

        tries_widths = self._tries_widths or link == "identity"
        found = choose_calibration(outputs, first.targets, link, noise_std, reduce, tries_widths)
        self.seconds = time.perf_counter() - self._start
        rank_zero_info(self._line(found, tries_widths))
        return found.scale, found.temperature

    def _line(self, found: Chosen, tries_widths: bool) -> str:
        """What was chosen, why and in what time."""
        fit = self._start - self._start_of_fit if self._start_of_fit else math.inf
        share = f", {100 * self.seconds / fit:.1f} % of the fit" if fit < math.inf else ""
        width = f"{found.scale:.3g}{'' if tries_widths else ' (no other was tried in so short a fit)'}"
        change = (
            f"the NLL falls from {found.nll_before:.4f} to {found.nll:.4f} (standard error {found.standard_error:.4f})"
            if found.choice != "neither"
            else f"the NLL is {found.nll:.4f}, and no change lowers it by more than its standard error"
        )
        return (
            f"Calibration on {self._rows} validation examples: width {width}, temperature "
            f"{found.temperature:.3g}; {change}. "
            f"It took {self.seconds:.1f} s{share}."
        )


def beside(trainer: Trainer, callback: Callback, calibration: Calibration) -> None:
    """Put the calibration of a callback behind it, where its state is saved and its hooks run before the checkpoint's."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [type(c).__name__ for c in callbacks if isinstance(c, ChosenPosterior) and c is not calibration]
    if others:
        raise UnsupportedTrainingError(
            f"calibrate=True and {others[0]} both choose the width of the posterior. Remove one of them."
        )
    if calibration not in callbacks and callback in callbacks:
        callbacks.insert(callbacks.index(callback) + 1, calibration)


def thinned(batches: Iterable[Any], count: int | None, rows: int) -> list[Any]:
    """About `rows` examples, spread over the `count` batches; the first ones if `count` is unknown."""
    kept, found = list[Any](), 0
    step = 1 if count is None else max(1, count // rows)
    of_batch = rows if count is None else max(1, -(-rows * step // count))
    for batch in islice(batches, 0, count, step):
        stride = max(1, rows_of(batch) // of_batch)
        kept.append(_every(batch, stride))
        found += rows_of(kept[-1])
        if count is None and found >= rows:
            break
    return kept


def rows_of(batch: Any) -> int:
    """The number of examples of a batch ``(inputs, targets)``; 0 for other batches."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
    return len(batch[1]) if is_pair and batch[1].dim() else 0


def _every(batch: Any, stride: int) -> Any:
    """Every `stride`-th row of all tensors of a batch that have its rows."""
    rows = rows_of(batch)

    def some(tensor: Tensor) -> Tensor:
        return tensor[::stride] if tensor.dim() and len(tensor) == rows else tensor

    return apply_to_collection(batch, Tensor, some)


def _length(loader: Any, limit: int | None) -> int | None:
    """The number of batches to read; None if it is unknown."""
    try:
        length = len(loader)
    except TypeError:  # of an iterable data set
        return None
    return length if limit is None else min(length, limit)
