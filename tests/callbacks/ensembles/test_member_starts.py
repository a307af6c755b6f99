"""Members of modules that cannot be copied, of parametrized layers, and with the user's callbacks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from tiny_training import Classifier, assert_same_bits, fit, loader, quiet_trainer, weights
from torch import nn
from torch.nn.utils import parametrizations

from lightning_bayes import DeepEnsembleCallback
from lightning_bayes.callbacks.ensembles.member_starts import draw_anew
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.optim.readout import read_checkpoint


class Net(Classifier):
    """A module whose attribute cannot be copied."""

    def __init__(self, hidden=6, copyable=False):
        super().__init__(net=nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)))
        self.save_hyperparameters()
        self.lock = None if copyable else threading.Lock()


def members_of(module, folder, *callbacks, **options):
    ensemble = DeepEnsembleCallback(2)
    fit(module, ensemble, *callbacks, default_root_dir=folder, **options)
    return [read_checkpoint(Path(ensemble.folder) / f"member_{k}.ckpt")["state_dict"] for k in (1, 2)]


def test_a_module_that_cannot_be_copied_is_built_from_its_hyperparameters(tmp_path, caplog):
    caplog.set_level("INFO")
    found = []
    for copyable in (True, False):
        torch.manual_seed(3)
        found.append(members_of(Net(hidden=5, copyable=copyable), tmp_path))
    for copied, built in zip(*found, strict=True):
        assert_same_bits(built, copied)
    assert (
        "Net cannot be copied (TypeError: cannot pickle '_thread.lock' object), so each member is built" in caplog.text
    )


def test_building_a_member_draws_no_random_number(tmp_path):
    states = []
    for copyable in (True, False):
        torch.manual_seed(0)
        members_of(Net(copyable=copyable), tmp_path)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_module_that_can_neither_be_copied_nor_built_is_refused_before_the_fit(tmp_path):
    class Forgetful(Classifier):
        def __init__(self, hidden):
            super().__init__()
            self.lock = threading.Lock()

    module = Forgetful(6)
    match = r"cannot be copied \(TypeError.*\), nor built anew .*save_hyperparameters\(\).*members=\[\.\.\.\]"
    with pytest.raises(UnsupportedTrainingError, match=match):
        members_of(module, tmp_path)
    assert module.training_steps == 0


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_weights_are_drawn_anew(parametrize):
    torch.manual_seed(0)
    layer = nn.Linear(4, 6)
    net = nn.Sequential(parametrize(layer))
    before, start = weights(net), layer.weight.detach().clone()
    draw_anew(net)
    after = weights(net)
    assert [name for name in before if "original1" in name or name.endswith("weight.original")]
    assert not torch.allclose(layer.weight, start)
    assert not torch.equal(before["0.bias"], after["0.bias"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weights_that_a_hook_computes_are_named(tmp_path):
    module = Classifier(net=nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 3))))
    match = r"draws net\.0\.weight_g, net\.0\.weight_v\. .* members=\[\.\.\.\]"
    with pytest.raises(UnsupportedLayerError, match=match):
        members_of(module, tmp_path)


class Clamp(Callback):
    """Changes training."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch.no_grad():
            for param in pl_module.parameters():
                param.clamp_(-0.1, 0.1)


def test_every_member_trains_with_copies_of_the_callbacks(tmp_path):
    found = members_of(Net(copyable=True), tmp_path, Clamp())
    assert max(value.abs().max() for member in found for value in member.values()) <= 0.1 + 1e-6


def test_a_member_stops_where_its_own_callback_says(tmp_path):
    class Watched(Net):
        epochs: list[int] = []  # noqa: RUF012

        def training_step(self, batch, batch_idx):
            self.log("quality", float(self.current_epoch))
            return super().training_step(batch, batch_idx)

        def on_train_end(self):
            self.epochs.append(self.current_epoch)

    stop = EarlyStopping("quality", mode="min", patience=2, check_on_train_epoch_end=True)
    members_of(Watched(copyable=True), tmp_path, stop, max_epochs=9)
    assert Watched.epochs == [3, 3]


def test_a_callback_that_cannot_be_copied_is_named(tmp_path):
    class Locked(Clamp):
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.warns(
        UserWarning, match=r"2 to 2 train without the callbacks Locked \(TypeError: cannot pickle .*\)\."
    ):
        members_of(Net(copyable=True), tmp_path, Locked())


def test_a_callback_that_watches_validation_sees_the_first_fit_alone(tmp_path):
    class Reports(Callback):
        found: list[float] = []  # noqa: RUF012  # as of a hyperparameter search

        def on_validation_end(self, trainer, pl_module):
            self.found.append(float(trainer.callback_metrics["val_loss"]))

    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    trainer = quiet_trainer(DeepEnsembleCallback(2), Reports(), default_root_dir=tmp_path, num_sanity_val_steps=0)
    trainer.fit(Validated(copyable=True), loader(), loader())
    assert len(Reports.found) == 1


def test_objects_among_the_hyperparameters_do_not_end_the_fit(tmp_path):
    class Configured(Net):
        def __init__(self, activation=nn.Tanh):
            super().__init__(copyable=True)
            self.save_hyperparameters()

    assert len(members_of(Configured(nn.ReLU), tmp_path)) == 2
