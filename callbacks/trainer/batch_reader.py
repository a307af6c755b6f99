"""Batches as the training step takes them, for passes after the fit: what a batch does not tell, the user's step does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bayes.callbacks.trainer.loaders import random_state_kept
from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.errors import BayesError, DataError, UnsupportedTrainingError
from lightning_bayes.likelihood import Labels, Likelihood, ReadOutput, labels_in, labels_of_pair
from lightning_bayes.likelihood.batches import is_pair
from lightning_bayes.likelihood.record import StepRecorder
from lightning_bayes.predictive.repeated import copied


@final
class BatchReader:
    """Reads batches as the training step of a module takes them: ``forward``'s arguments, targets, masks and weights.

    Where the batch does not tell them, the user's ``training_step`` runs under a recorder. It logs nothing, and buffers,
    metrics, lists and counters of the module, and the global random state are the same afterwards. Where no step tells
    them either, batches are pairs (inputs, targets).

    Args:
        module: The user's module.
        likelihood: What its training loss says about the outputs, completed by what the user states.
        is_recorded: Whether a step has been recorded; otherwise batches are pairs.
        is_stated: Whether the user states the likelihood: a step that does not tell its targets is then no error, and
            several terms that score the same targets are one.
    """

    def __init__(
        self, module: LightningModule, likelihood: Likelihood, is_recorded: bool = True, is_stated: bool = False
    ) -> None:
        self.module, self.likelihood, self._is_stated = module, likelihood, is_stated
        self._reads_pairs: bool | None = None if is_recorded else True  # None until the first batch tells

    @property
    def runs_step(self) -> bool:
        """Whether batches alone do not tell the inputs and the targets."""
        return self.likelihood.inputs is None or not self.likelihood.is_known

    def __call__(self, batch: Any) -> list[ReadOutput]:
        """The terms of the loss on a batch on the module's device, with their graph where gradients are enabled."""
        return self.labels(batch).terms(self.module)

    def labels(self, batch: Any) -> Labels:
        """The arguments and the targets of a batch on the module's device."""
        found = None if self._reads_pairs else self._told(batch)
        if self._reads_pairs is None:
            self._reads_pairs = found is None
        return labels_of_pair(self.module.forward, batch, self.likelihood) if found is None else found

    def _told(self, batch: Any) -> Labels | None:
        """What the batch or the step tells; None if a pair has to do."""
        try:
            found = self._of_step(copied(batch)) if self.runs_step else labels_in(batch, self.likelihood)
        except BayesError:
            has_form = is_pair(batch) and not self.runs_step  # of pairs that differ from those in training
            if self._reads_pairs is None and (self._is_stated or has_form):
                return None
            raise
        terms = found.of_step
        if terms is None:
            return found
        one = terms[:1] if self._is_stated and terms and _are_one(terms) else terms
        return found._replace(of_step=one) if terms else None

    def _of_step(self, batch: Any) -> Labels:
        with recorded_step(self.module, batch) as (recorder, loss):
            return recorder.read(loss)


def _are_one(terms: list[ReadOutput]) -> bool:
    """Whether terms of a loss score the same targets of the same output."""
    first, others = terms[0], terms[1:]
    return all(
        other.outputs is first.outputs
        and torch.equal(other.targets, first.targets)
        and torch.equal(other.counted, first.counted)
        for other in others
    )


def recorded_likelihood(module: LightningModule, batch: Any) -> Likelihood:
    """What the training step says about the outputs on a batch that was not recorded in a fit."""
    with recorded_step(module, copied(batch)) as (recorder, loss):
        return recorder.likelihood(loss)


@contextmanager
def recorded_step(module: LightningModule, batch: Any) -> Iterator[tuple[StepRecorder, Tensor]]:
    """Context with the record of an additional training step and its loss; see `unchanged`."""
    if not module.automatic_optimization:
        raise UnsupportedTrainingError(
            f"Only {type(module).__name__}.training_step tells the targets of a batch, but with manual optimization it "
            "also updates the weights. Take the loss of the batch's own targets, or state the likelihood with link=..."
        )
    recorder = StepRecorder(module)
    with unchanged(module), torch.inference_mode(False), torch.enable_grad():
        recorder.start(batch)
        try:
            loss = _loss_of(_called(module, batch))
            if loss is None:
                raise DataError(f"{type(module).__name__}.training_step returns no loss for a batch.")
            yield recorder, loss
        finally:
            recorder.stop()


@contextmanager
def unchanged(module: LightningModule) -> Iterator[None]:
    """Context for an additional step of a module: it logs nothing, and what it changes is as before afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    owners = [module, *(each for each in module.modules() if isinstance(each, Metric))]
    kept = [(owner, {name: _kept(value) for name, value in vars(owner).items()}) for owner in owners]
    patches = Patches()
    for name in ("log", "log_dict"):
        patches.set(module, name, _ignore)
    try:
        with random_state_kept(module):
            yield
    finally:
        patches.undo()
        for owner, values in kept:
            vars(owner).update(values)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.data.copy_(value)  # graphs that have saved the buffer keep their version of it


def _kept(value: Any) -> Any:
    """A value that survives changes in place: a copy of a tensor, a list, a dictionary of plain values, or itself."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    return copy.copy(value) if type(value) in {list, set} else value


def _ignore(*args: Any, **kwargs: Any) -> None:
    return


def _called(module: LightningModule, batch: Any) -> Any:
    """What the training step returns for a batch, under the precision of the trainer."""
    arguments = [batch, 0][: len(inspect.signature(module.training_step).parameters)]
    with module.trainer.precision_plugin.forward_context():
        return module.training_step(*arguments)


def _loss_of(returned: Any) -> Tensor | None:
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    return loss if isinstance(loss, Tensor) else None
