"""Unsupported trainers and optimizers of other packages are refused by name before training."""

from __future__ import annotations

import pytest
import torch
from tiny_training import Classifier, loader, mlp, quiet_trainer

from lightning_bayes import (
    DeepEnsembleCallback,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    SWAGCallback,
    VOGNCallback,
)
from lightning_bayes.errors import UnsupportedTrainingError


@pytest.mark.parametrize("stage", ["fit", "test", "predict"])
@pytest.mark.parametrize(
    "callback",
    [VOGNCallback, IVONCallback, MCDropoutCallback, SWAGCallback, LaplaceCallback, lambda: DeepEnsembleCallback(2)],
)
def test_a_trainer_of_pytorch_lightning_is_refused_by_its_name(callback, stage):
    package = pytest.importorskip("pytorch_lightning")
    trainer = package.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(
        UnsupportedTrainingError, match=r"pytorch_lightning.*Import the Trainer.* from lightning\.pytorch"
    ):
        callback().setup(trainer, Classifier(), stage)


class WithoutRate(torch.optim.SGD):
    """transformers' Adafactor with its defaults."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None


class ScheduleFree(torch.optim.SGD):
    """schedule-free's optimizers, which train and evaluate different weights."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self):
        """Switch to the training weights."""


@pytest.mark.parametrize(("kind", "message"), [(WithoutRate, r"lr=None.*lr=1e-3"), (ScheduleFree, "schedule-free")])
def test_optimizers_without_a_step_to_bound_are_refused(kind, message):
    module = Classifier(lambda m: kind(list(m.parameters())), net=mlp(0))
    with pytest.raises(UnsupportedTrainingError, match=message):
        quiet_trainer(VOGNCallback(), max_epochs=1).fit(module, loader())
