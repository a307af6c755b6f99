"""What a run has stored is its own: two runs of a folder, resumed and interrupted fits, one object for two fits."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tiny_training import RecordingClassifier, blobs, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import DeepEnsembleCallback, MultiModeCallback
from lightning_bayes.errors import PosteriorError

# Most resumed fits here validate nothing.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


class Net(RecordingClassifier):
    def __init__(self, seed=0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.03)


def shifted():
    """The same inputs with other labels, so that another run's networks are wrong."""
    x, y = blobs().tensors
    return DataLoader(TensorDataset(x, (y + 1) % 3), batch_size=8)


def fitted(seed, data, folder, checkpoint, callback=None, **options):
    module, trainer = (
        Net(seed),
        quiet_trainer(callback or DeepEnsembleCallback(2), max_epochs=8, **{"default_root_dir": folder, **options}),
    )
    trainer.fit(module, data, data)
    trainer.save_checkpoint(checkpoint)
    return trainer, module


def loss_of(checkpoint, data, callback=None):
    (result,) = quiet_trainer(callback or DeepEnsembleCallback(2)).test(
        Net(), data, ckpt_path=checkpoint, verbose=False
    )
    return result["loss"]


@pytest.mark.parametrize("logs", [False, True])
def test_a_second_run_of_a_folder_leaves_the_members_of_the_first(logs, tmp_path):
    losses = []
    for seed, data in enumerate((loader(), shifted())):
        logger = CSVLogger(tmp_path, name="run", version=0) if logs else False
        with pytest.warns(UserWarning, match="exists and is not empty") if logs and seed else nullcontext():
            fitted(seed, data, tmp_path, tmp_path / f"{seed}.ckpt", logger=logger)
        losses.append(loss_of(tmp_path / f"{seed}.ckpt", data))
    assert [loss_of(tmp_path / f"{seed}.ckpt", data) for seed, data in enumerate((loader(), shifted()))] == losses
    assert losses[0] != losses[1]


def at_its_weights(module):
    with torch.no_grad():
        return pytest.approx(F.cross_entropy(module.net(blobs().tensors[0]), blobs().tensors[1]).item(), rel=1e-5)


class Interrupt(Callback):
    """Ctrl-C in an update."""

    def __init__(self, update):
        self.update = update

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.update:
            raise KeyboardInterrupt


def interrupted(callback, folder, update):
    module, trainer = Net(1), quiet_trainer(callback, Interrupt(update), max_epochs=8, default_root_dir=folder)
    with pytest.raises(SystemExit):
        trainer.fit(module, shifted(), shifted())
    return trainer, module


def test_an_interrupted_fit_has_no_members_of_the_fit_before(tmp_path):
    callback = DeepEnsembleCallback(2)
    fitted(0, loader(), tmp_path, tmp_path / "first.ckpt", callback)
    trainer, module = interrupted(callback, tmp_path, 5)
    with pytest.warns(UserWarning, match=r"interrupted, and 2 of 2 members are not trained\. Resume the fit"):
        (found,) = trainer.test(module, loader(), verbose=False)
    assert found["loss"] == at_its_weights(module)
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    with pytest.raises(PosteriorError, match=r"2 of 2 members are not trained .* interrupted, .* Resume the fit"):
        loss_of(tmp_path / "second.ckpt", loader())


@pytest.mark.parametrize("longer", [False, True])
def test_a_resumed_fit_leaves_the_members_of_the_checkpoint_that_it_resumes_from(longer, tmp_path):
    fitted(0, loader(), tmp_path, tmp_path / "short.ckpt")
    before = loss_of(tmp_path / "short.ckpt", loader())
    trainer = quiet_trainer(DeepEnsembleCallback(2), max_epochs=16 if longer else 8, default_root_dir=tmp_path)
    trainer.fit(Net(), shifted(), ckpt_path=tmp_path / "short.ckpt")
    trainer.save_checkpoint(tmp_path / "long.ckpt")
    assert loss_of(tmp_path / "short.ckpt", loader()) == before
    assert (loss_of(tmp_path / "long.ckpt", loader()) == before) is not longer


def test_two_continuations_of_a_checkpoint_have_members_of_their_own(tmp_path):
    fitted(0, loader(), tmp_path, tmp_path / "middle.ckpt")
    losses = []
    for index, data in enumerate((loader(), shifted())):
        trainer = quiet_trainer(DeepEnsembleCallback(2), max_epochs=16, default_root_dir=tmp_path)
        trainer.fit(Net(), data, ckpt_path=tmp_path / "middle.ckpt")
        trainer.save_checkpoint(tmp_path / f"{index}.ckpt")
        losses.append(loss_of(tmp_path / f"{index}.ckpt", data))
    assert loss_of(tmp_path / "0.ckpt", loader()) == losses[0]


def test_a_run_that_was_moved_is_found_beside_its_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    fitted(0, loader(), tmp_path / "run", tmp_path / "run" / "last.ckpt")
    before = loss_of(tmp_path / "run" / "last.ckpt", loader())
    shutil.move(tmp_path / "run", tmp_path / "archive")
    assert loss_of(tmp_path / "archive" / "last.ckpt", loader()) == before


def test_a_member_that_was_replaced_is_named(tmp_path):
    callback = DeepEnsembleCallback(2)
    fitted(0, loader(), tmp_path, tmp_path / "run.ckpt", callback)
    folder = next((tmp_path / "members").iterdir())
    shutil.copy(folder / "member_1.ckpt", folder / "member_2.ckpt")
    with pytest.raises(PosteriorError, match=r"member_2\.ckpt is not the one that the fit has trained"):
        loss_of(tmp_path / "run.ckpt", loader())


@pytest.mark.parametrize("make", [lambda: DeepEnsembleCallback(2), MultiModeCallback])
def test_the_module_of_an_earlier_fit_is_evaluated_at_its_own_weights(make, tmp_path):
    callback = make()
    trainer, module = fitted(0, loader(), tmp_path, tmp_path / "0.ckpt", callback)
    fitted(1, shifted(), tmp_path, tmp_path / "1.ckpt", callback)
    with pytest.warns(UserWarning, match="at the module's current weights, which are not those of its last fit"):
        (found,) = trainer.test(module, loader(), verbose=False)
    assert found["loss"] == at_its_weights(module)


def test_modes_of_an_interrupted_fit_are_counted(tmp_path):
    trainer, _ = interrupted(MultiModeCallback(), tmp_path, 30)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.warns(UserWarning, match="averages over 1 of 3 modes: the fit ended within a cycle"):
        loss_of(tmp_path / "run.ckpt", shifted(), MultiModeCallback())
