"""Copies and pickles of trainers and callbacks, before, during and after a fit, as plain Lightning's."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from lightning.pytorch import Callback
from tiny_training import ValidatedClassifier, loader, quiet_trainer
from torch import nn

from lightning_bayes import (
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    NoisyKFACCallback,
    SWAGCallback,
    VOGNCallback,
)


def through_torch_save(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def through_joblib(value):
    joblib, stream = pytest.importorskip("joblib"), io.BytesIO()
    joblib.dump(value, stream)
    stream.seek(0)
    return joblib.load(stream)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch": through_torch_save,
    "joblib": through_joblib,
}
KINDS = {
    "VOGN": VOGNCallback,
    "natural step": lambda: VOGNCallback(lr=0.01, mc_samples=2),
    "IVON": IVONCallback,
    "NoisyKFAC": NoisyKFACCallback,
    "SWAG": lambda: SWAGCallback(start=0),
    "Laplace": lambda: LaplaceCallback(prior_precision=1.0),
    "dropout": MCDropoutCallback,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def module_of():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ValidatedClassifier(net=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3)))


class CopyOnce(Callback):
    """Copies the trainer at the end of the second batch."""

    def __init__(self, way):
        self.way, self.made = way, None

    def __getstate__(self):
        return {"way": None, "made": None}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.way is not None and trainer.global_step == 2:
            self.made = self.way(trainer)


def validated(trainer, module):
    return trainer.validate(module, loader(), verbose=False)


def trained(trainer, module):
    torch.manual_seed(1)
    trainer.fit_loop.max_epochs = trainer.current_epoch + 2
    trainer.fit(module, loader(), loader())
    return [param.detach().clone() for param in module.parameters()]


@every_kind
@every_way
def test_a_trainer_copied_after_its_fit_validates_and_trains_on_like_the_original(kind, way):
    module, trainer = module_of(), quiet_trainer(kind(), max_epochs=4)
    trained(trainer, module)
    other = way(trainer)
    assert validated(other, other.lightning_module) == validated(trainer, module)
    assert all(map(torch.equal, trained(other, other.lightning_module), trained(trainer, module)))


@every_kind
@every_way
def test_a_copy_made_during_a_fit_leaves_the_fit_alone_and_can_train(kind, way):
    module, twin = module_of(), module_of()
    copies = CopyOnce(way)
    trainer = quiet_trainer(kind(), copies, max_epochs=4)
    weights = trained(trainer, module)
    assert all(map(torch.equal, weights, trained(quiet_trainer(kind(), CopyOnce(None), max_epochs=4), twin)))
    other = copies.made
    before = [param.detach().clone() for param in module.parameters()]
    assert all(param.isfinite().all() for param in trained(other, other.lightning_module))
    assert all(map(torch.equal, before, module.parameters()))


@every_kind
@every_way
def test_a_callback_is_copied_before_and_after_a_fit(kind, way):
    fresh = way(kind())
    module, callback = module_of(), kind()
    trainer = quiet_trainer(fresh, max_epochs=4)
    trained(trainer, module)
    other, expected = quiet_trainer(way(fresh), max_epochs=4), validated(trainer, module)
    assert type(fresh) is type(callback)
    assert validated(other, module) == expected
