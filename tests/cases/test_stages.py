"""Data that a callback loads on its own arrive in the stage to which they belong, whatever the trainer does meanwhile."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import RunningStage
from tiny_training import quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    BatchNormRecalibration,
    Calibration,
    LaplaceCallback,
    MultiModeCallback,
    RejectorCallback,
    SWAGCallback,
    VOGNCallback,
)
from lightning_bayes.zoo import BayesClassifier

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
OF_DATA = {0: RunningStage.TRAINING, 100: RunningStage.VALIDATING, 200: RunningStage.TESTING}


class Data(LightningDataModule):
    """Marks the rows of each set, and records the trainer's stage at each transfer: augmentation on the device asks it."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def _loader(self, mark):
        return DataLoader(TensorDataset(X + mark, Y), 12)

    def train_dataloader(self):
        return self._loader(0)

    def val_dataloader(self):
        return self._loader(100)

    def test_dataloader(self):
        return self._loader(200)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.seen.add((round(batch[0].mean().item() / 100) * 100, self.trainer.state.stage))
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.on_before_batch_transfer(batch, dataloader_idx)


CALLBACKS = [
    lambda: [Calibration(refit=True)],
    lambda: [VOGNCallback(), Calibration(refit=True), BatchNormRecalibration(batches=2)],
    lambda: [LaplaceCallback()],
    lambda: [LaplaceCallback(prior_precision="marglik", online_every=1, subset="all")],
    lambda: [SWAGCallback()],
    lambda: [SWAGCallback(), Calibration(refit=True)],
    lambda: [VOGNCallback(calibrate=True)],
    lambda: [MultiModeCallback(num_modes=2)],
    lambda: [VOGNCallback(), MultiModeCallback(num_modes=2)],
    lambda: [MultiModeCallback(num_modes=2), BatchNormRecalibration(batches=2)],
    lambda: [VOGNCallback(), RejectorCallback()],
]


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The test continues without rejection")
@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_every_batch_arrives_in_its_own_stage(callbacks):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    module = BayesClassifier(net, num_classes=2, optimizer=lambda p: torch.optim.Adam(p, 1e-2))
    data = Data()
    trainer = quiet_trainer(*callbacks(), max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert data.seen == {(mark, OF_DATA[mark]) for mark, _ in data.seen}
    assert {mark for mark, _ in data.seen} == {0, 100, 200}
