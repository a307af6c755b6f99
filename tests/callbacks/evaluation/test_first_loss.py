"""The likelihood of a fit is recorded in its first step with a loss, by a callback that then leaves the trainer."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback
from tiny_training import Classifier, fit, quiet_trainer

from lightning_bayes import LaplaceCallback, SWAGCallback, VOGNCallback
from lightning_bayes.callbacks.evaluation.first_loss import FirstLoss


class Present(Callback):
    """Notes in which batches `FirstLoss` is among the trainer's callbacks, and which of its own hooks are called."""

    def __init__(self):
        self.batches, self.ends = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(any(isinstance(each, FirstLoss) for each in trainer.callbacks))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends.append(batch_idx)


class LateLoss(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx else None


@pytest.mark.parametrize("make", [VOGNCallback, LaplaceCallback, lambda: SWAGCallback(start=0.0)])
def test_it_leaves_after_the_first_batch_and_no_hook_of_another_callback_is_skipped(make):
    callback, present = make(), Present()
    trainer = fit(Classifier(), callback, present)
    assert present.batches == [True] + [False] * 5
    assert present.ends == list(range(6))
    assert callback.loss_likelihood.classifies
    assert not any(isinstance(each, FirstLoss) for each in trainer.callbacks)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_it_waits_for_a_loss():
    callback, present = VOGNCallback(), Present()
    fit(LateLoss(), callback, present)
    assert present.batches == [True, True, False, False, False, False]
    assert callback.loss_likelihood.classifies


def test_it_leaves_a_fit_that_breaks():
    class Breaks(Classifier):
        def training_step(self, batch, batch_idx):
            raise ValueError("no step")

    trainer = quiet_trainer(VOGNCallback(num_data=1))
    with pytest.raises(ValueError, match="no step"):
        trainer.fit(Breaks(), [(0, 0)])
    assert not any(isinstance(each, FirstLoss) for each in trainer.callbacks)
