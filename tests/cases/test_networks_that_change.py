"""Networks whose parameters change their names or go: pruned, merged or unparametrized, in a fit and after it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from tiny_training import RecordingClassifier, blobs, loader, quiet_trainer
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_bayes import DeepEnsembleCallback, MultiModeCallback, SWAGCallback, VOGNCallback, load_posterior

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")


class Net(RecordingClassifier):
    """Its method `at_the_end` runs in `on_train_end`."""

    def __init__(self, first=None, at_the_end=None):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(net=nn.Sequential(first or nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
        self.at_the_end = at_the_end

    def on_train_end(self):
        if self.at_the_end is not None:
            self.at_the_end(self)


def pruning():
    return ModelPruning("l1_unstructured", amount=0.1)


METHODS = {
    "VOGN": lambda: [VOGNCallback(calibrate=False)],
    "SWAG": lambda: [SWAGCallback(start=0)],
    "modes": lambda: [MultiModeCallback()],
    "modes of VOGN": lambda: [VOGNCallback(calibrate=False), MultiModeCallback()],
    "ensemble": lambda: [DeepEnsembleCallback(2)],
}


def evaluated(trainer, module, **options):
    (result,) = trainer.test(module, loader(), verbose=False, **options)
    return result["loss"]


def at_its_weights(module):
    with torch.no_grad():
        return pytest.approx(F.cross_entropy(module.net(blobs().tensors[0]), blobs().tensors[1]).item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:MultiModeCallback evaluates the last mode alone")
@pytest.mark.parametrize("method", METHODS)
def test_a_fit_that_prunes_is_evaluated_as_its_checkpoint_and_resumes(method, tmp_path):
    kept = ModelCheckpoint(tmp_path, save_last=True)
    module, callbacks = Net(), METHODS[method]()
    options = {"max_epochs": 6, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = quiet_trainer(pruning(), *callbacks, kept, **options)
    trainer.fit(module, loader(), loader())
    found = evaluated(trainer, module)  # without a warning that its weights are other ones
    assert found != at_its_weights(module)
    assert (module.net[0].weight == 0).any()
    later = quiet_trainer(*METHODS[method]())
    assert evaluated(later, Net(), ckpt_path=tmp_path / "last.ckpt") == pytest.approx(found, rel=1e-5)
    again = quiet_trainer(pruning(), *METHODS[method](), max_epochs=8, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="cycles end at updates") if "modes" in method else nullcontext():
        again.fit(Net(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt")


def test_the_posterior_of_a_pruned_fit_has_the_weights_of_its_checkpoint(tmp_path):
    kept = ModelCheckpoint(tmp_path, save_last=True)
    module = Net()
    trainer = quiet_trainer(pruning(), VOGNCallback(), kept, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module, loader(), loader())
    posterior = load_posterior(tmp_path / "last.ckpt")
    assert posterior.mean.keys() == dict(module.named_parameters()).keys()
    for name, param in module.named_parameters():
        assert torch.equal(posterior.mean[name], param)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def merge(module):
    layer = module.net[0]
    layer.base.weight.data += layer.b.weight @ layer.a.weight
    module.net[0] = layer.base


def masked():
    return prune.l1_unstructured(nn.Linear(4, 6), "weight", 0.3)


CHANGES = {
    "LoRA": (LoRA, merge),
    "weight_norm": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 6)),
        lambda module: parametrize.remove_parametrizations(module.net[0], "weight"),
    ),
    "masks": (masked, lambda module: prune.remove(module.net[0], "weight")),
}


@pytest.mark.filterwarnings("ignore:VOGNCallback did not find the posterior of its module:UserWarning")
@pytest.mark.parametrize("when", ["in on_train_end", "after the fit"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["VOGN", "SWAG", "modes"])
def test_a_network_that_was_changed_is_evaluated_and_saved(method, change, when, tmp_path):
    make, alter = CHANGES[change]
    module, callbacks = Net(make(), alter if when == "in on_train_end" else None), METHODS[method]()
    trainer = quiet_trainer(*callbacks, max_epochs=4)
    trainer.fit(module, loader(), loader())
    if when == "after the fit":
        evaluated(trainer, module)  # without a warning
        alter(module)
    loses_names = change != "masks"
    follows = not loses_names and (
        when == "in on_train_end" or method == "SWAG"
    )  # it has the products of weights and masks
    with nullcontext() if follows else pytest.warns(UserWarning, match="at the module's current weights"):
        found = evaluated(trainer, module)
    assert follows or found == at_its_weights(module)
    loses_posterior = pytest.warns(UserWarning, match=r"no longer part of Net.*Save one before")
    with loses_posterior if method == "VOGN" and loses_names else nullcontext():
        trainer.save_checkpoint(tmp_path / "changed.ckpt")
    assert torch.load(tmp_path / "changed.ckpt", weights_only=True)["state_dict"].keys() == module.state_dict().keys()
