"""The callbacks' default curvature interval; passes that skip the curvature run the bare model and loss."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from tiny_training import Classifier, assert_same_bits, loader, quiet_trainer, weights

from lightning_bayes import IVONCallback, NoisyKFACCallback, OGNCallback, VadamCallback, VOGNCallback


class BarePasses(Callback):
    """Records the training steps in which the model runs without hooks, wrapped forwards and torch-function modes."""

    def __init__(self):
        self.found = []

    def setup(self, trainer, pl_module, stage):
        step = pl_module.training_step

        def watched(batch, batch_idx):
            layers = list(pl_module.net.modules())
            hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
            touched = hooks or any("forward" in vars(layer) for layer in layers)
            self.found.append(not touched and not torch.overrides._get_current_function_mode_stack())
            return step(batch, batch_idx)

        pl_module.training_step = watched


def fit(callback, *others, max_epochs=4, **options):
    torch.manual_seed(0)
    module = Classifier()
    quiet_trainer(callback, *others, max_epochs=max_epochs, **options).fit(module, loader())
    return module


@pytest.mark.parametrize(
    ("callback", "interval"),
    [
        (VOGNCallback(), 10),
        (VadamCallback(), 10),
        (VOGNCallback(curvature_interval=3), 3),
        (VOGNCallback(lr=0.1), 1),
        (VOGNCallback.from_preset("osawa2019-cifar10-resnet18"), 1),
        (OGNCallback(), 1),  # its curvature divides the gradient
        (IVONCallback(), 1),  # its curvature costs nothing
        (NoisyKFACCallback(), 1),  # it has stats_interval
    ],
)
def test_only_the_users_own_step_measures_less_often(callback, interval):
    assert callback.group_defaults["curvature_interval"] == interval


def test_updates_that_do_not_measure_run_the_bare_model():
    """24 updates: the first ten and the twentieth measure."""
    passes = BarePasses()
    fit(VOGNCallback(), passes)
    assert passes.found == [False] * 10 + [True] * 9 + [False] + [True] * 4


def test_every_update_is_the_same_whether_examples_are_counted_or_not(monkeypatch):
    bare = weights(fit(VOGNCallback()))
    monkeypatch.setattr("lightning_bayes.optim.variational.FIRST_UPDATES", 10**6)
    assert_same_bits(weights(fit(VOGNCallback())), bare)


def test_trials_of_lightnings_tuner_measure_in_every_update(tmp_path):
    """The tuner trains without callbacks. A batch size that leaves no memory for measuring updates would be too large."""

    module, passes = Classifier(), BarePasses()
    module.lr = 1e-3
    finder = LearningRateFinder(num_training_steps=18, early_stop_threshold=None)
    trainer = quiet_trainer(VOGNCallback(), passes, finder, max_epochs=3, default_root_dir=tmp_path)
    trainer.fit(module, loader())
    trial, training = passes.found[:18], passes.found[18:]
    assert not any(trial)
    assert training[:10] == [False] * 10
    assert training[10:].count(False) == (len(training) - 10) // 10


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # it resumes a run in the same directory
def test_a_run_resumed_after_the_first_ten_updates_takes_the_same_bare_passes(tmp_path):
    """A pass that counts its examples differs from a bare pass by rounding only."""
    whole_passes, resumed_passes = BarePasses(), BarePasses()
    saving = {"enable_version_counter": False, "save_top_k": -1}
    kept = [ModelCheckpoint(tmp_path, "{epoch}", **saving) for _ in range(2)]
    whole = fit(VOGNCallback(), kept[0], whole_passes, enable_checkpointing=True)
    module = Classifier()
    trainer = quiet_trainer(VOGNCallback(), kept[1], resumed_passes, max_epochs=4, enable_checkpointing=True)
    trainer.fit(module, loader(), ckpt_path=tmp_path / "epoch=1.ckpt")  # after 12 of 24 updates
    assert resumed_passes.found == whole_passes.found[12:]
    assert resumed_passes.found[0]
    assert_same_bits(weights(module), weights(whole))
