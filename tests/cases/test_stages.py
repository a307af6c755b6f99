"""Data that a callback loads on its own arrive in the stage to which they belong, whatever the trainer does meanwhile."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from tiny_training import Classifier, quiet_trainer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_bayes import (
    BatchNormRecalibration,
    Calibration,
    DeepEnsembleCallback,
    LaplaceCallback,
    MultiModeCallback,
    SWAGCallback,
    VOGNCallback,
)
from lightning_bayes.errors import UnknownNumDataError
from lightning_bayes.zoo import BayesClassifier

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
OF_DATA = {0: RunningStage.TRAINING, 100: RunningStage.VALIDATING, 200: RunningStage.TESTING}


class Data(LightningDataModule):
    """Marks the rows of each set, and records the trainer's stage at each transfer: augmentation on the device asks it."""

    def __init__(self):
        super().__init__()
        self.seen, self.asked, self.moves = set(), set(), Counter()

    def _ask(self, what):
        self.asked.add((what, self.trainer.state.fn, self.trainer.state.stage))

    def setup(self, stage):
        self._ask(f"setup {stage}")

    def _loader(self, mark):
        self._ask(f"loader {mark}")
        return DataLoader(TensorDataset(X + mark, Y), 12)

    def train_dataloader(self):
        return self._loader(0)

    def val_dataloader(self):
        return self._loader(100)

    def test_dataloader(self):
        return self._loader(200)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.seen.add((round(batch[0].mean().item() / 100) * 100, self.trainer.state.stage))
        self.moves["before"] += 1
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen.add((round(batch[0].mean().item() / 100) * 100, self.trainer.state.stage))
        self.moves["after"] += 1
        return batch


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
]


@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_every_batch_arrives_in_its_own_stage(callbacks):
    data = fitted_and_tested(callbacks(), Data())
    assert data.seen == {(mark, OF_DATA[mark]) for mark, _ in data.seen}
    assert {mark for mark, _ in data.seen} == {0, 100, 200}
    assert data.moves["before"] == data.moves["after"]
    # What a callback asks for beyond plain Lightning, it asks for in the state of a fit or of a validation.
    assert data.asked - fitted_and_tested([], Data()).asked <= {
        ("setup fit", "fit", RunningStage.TRAINING),
        ("loader 0", "fit", RunningStage.TRAINING),
        ("setup validate", "validate", RunningStage.VALIDATING),
        ("loader 100", "validate", RunningStage.VALIDATING),
    }


def fitted_and_tested(callbacks, data, **arguments):
    trainer = quiet_trainer(*callbacks, max_epochs=3, num_sanity_val_steps=0, **arguments)
    module = classifier()
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    return data


def classifier():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return BayesClassifier(net, num_classes=2, optimizer=lambda p: torch.optim.Adam(p, 1e-2))


class Shifts(Data):
    """Normalises each batch in place, as users do to save memory."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch[0].add_(1000)
        self.moves[round(batch[0].mean().item() / 1000)] += 1
        return batch

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("callbacks", CALLBACKS[:-1])
def test_a_hook_that_acts_in_place_acts_once_on_a_batch(callbacks):
    assert fitted_and_tested(callbacks(), Shifts()).moves.keys() == {1}


class Asks(Dataset):
    """Refuses to load in the stage of another set, in a worker process, which has the state of the time it started."""

    def __init__(self, stage, data):
        self.stage, self.data = stage, data

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        assert self.data.trainer.state.stage == self.stage
        return X[index], Y[index]


class InWorkers(Data):
    def _loader(self, mark):
        return DataLoader(Asks(OF_DATA[mark], self), 12, num_workers=1)


@pytest.mark.parametrize("callbacks", [CALLBACKS[1], CALLBACKS[7]])
def test_workers_start_in_the_stage_of_their_data(callbacks, recwarn):
    fitted_and_tested(callbacks(), InWorkers())
    assert not [str(warning.message) for warning in recwarn if "did not find" in str(warning.message)]


class Collections(Data):
    """Loaders as Lightning takes them, here with another first set."""

    def __init__(self, collect):
        super().__init__()
        self.collect = collect

    def val_dataloader(self):
        return self.collect([super()._loader(100), super()._loader(200)])


@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("collect", [list, lambda sets: dict(zip("ab", sets, strict=True)), CombinedLoader])
@pytest.mark.parametrize("callbacks", [CALLBACKS[1], CALLBACKS[2], CALLBACKS[8]])
def test_the_first_of_several_validation_sets_chooses(collect, callbacks, recwarn):
    class Several(BayesClassifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    if collect is CombinedLoader:
        collect = partial(CombinedLoader, mode="sequential")
    module = Several(torch.nn.Linear(4, 2), num_classes=2, optimizer=lambda p: torch.optim.Adam(p, 1e-2))
    data = Collections(collect)
    trainer = quiet_trainer(*callbacks(), max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert not [str(warning.message) for warning in recwarn if "did not find" in str(warning.message)]


class Pairs(Classifier):
    """Trained on a dictionary of batches, which its forward takes whole."""

    def __init__(self):
        super().__init__(net=torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))

    def forward(self, batch):
        return self.net(batch["labelled"][0])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch["labelled"][1])


def test_several_training_loaders_yield_what_the_training_step_gets():
    labelled, other = (DataLoader(TensorDataset(X[:size], Y[:size]), 12) for size in (48, 24))
    loaders = CombinedLoader({"labelled": labelled, "other": other}, "min_size")
    module, swag = Pairs(), SWAGCallback(start=0.0, num_data=48)
    quiet_trainer(swag, max_epochs=2).fit(module, loaders)
    passes = [X[:12], X[12:24]]  # of the shorter loader
    outputs = torch.cat([module.net[0](x) for x in passes]).detach()
    assert swag.posterior.num_data == 48
    torch.testing.assert_close(module.net[1].running_mean, outputs.mean(0), rtol=1e-4, atol=1e-5)


def test_an_unknown_number_of_examples_is_asked_for_before_the_fit():
    loaders = {"labelled": DataLoader(TensorDataset(X, Y), 12), "other": DataLoader(TensorDataset(X, Y), 12)}
    with pytest.raises(UnknownNumDataError, match="Pass num_data="):
        quiet_trainer(SWAGCallback(), max_epochs=4).fit(Pairs(), loaders)


class Grows(Classifier):
    """Its training set has 12 more rows in each epoch."""

    def __init__(self):
        super().__init__(net=torch.nn.Linear(4, 3))

    def train_dataloader(self):
        size = 12 * (1 + self.trainer.current_epoch)
        return DataLoader(TensorDataset(X[:size], Y[:size]), 12)


@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("callback", [LaplaceCallback, SWAGCallback])
def test_what_is_fitted_at_the_end_is_fitted_on_the_last_epoch_of_growing_data(callback):
    posthoc = callback()
    quiet_trainer(posthoc, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Grows())
    assert posthoc.posterior.num_data == 36


def test_members_reload_growing_data_as_the_first_fit_does(tmp_path, monkeypatch):
    rows = []
    monkeypatch.setattr(Grows, "on_train_batch_start", lambda self, batch, batch_idx: rows.append(len(batch[0])))
    arguments = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "default_root_dir": tmp_path}
    quiet_trainer(DeepEnsembleCallback(members=3), **arguments).fit(Grows())
    assert rows == 3 * (1 + 2 + 3) * [12]


@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("callback", [LaplaceCallback, SWAGCallback])
def test_the_limits_of_a_fit_hold_for_what_is_fitted_at_its_end(callback):
    data, posthoc = Data(), callback()
    trainer = quiet_trainer(posthoc, max_epochs=3, num_sanity_val_steps=0, limit_train_batches=2, limit_val_batches=0)
    trainer.fit(classifier(), datamodule=data)
    assert posthoc.posterior.num_data == 24
