"""Starting from another fit's weights: what is loaded, and what is refused."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from tiny_training import Classifier, assert_same_bits, fit, loader, mlp, quiet_trainer, weights
from torch import nn

from lightning_bayes import OGNCallback, VOGNCallback, WarmStart
from lightning_bayes.errors import PosteriorError


def network(hidden=6):
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 3))


class First(Callback):
    """The weights before the first batch."""

    def on_train_start(self, trainer, pl_module):
        self.weights, self.epoch = weights(pl_module), trainer.current_epoch


@pytest.fixture
def trained(tmp_path):
    """A module trained by OGN, and its checkpoint."""
    module = Classifier(net=network())
    fit(module, OGNCallback(), max_epochs=2).save_checkpoint(tmp_path / "ogn.ckpt")
    return module, tmp_path / "ogn.ckpt"


@pytest.mark.parametrize("order", [1, -1], ids=["before ours", "after ours"])
def test_noise_is_switched_on_in_the_weights_of_another_fit(trained, order):
    source, path = trained
    callback, first = VOGNCallback(kl_warmup_steps=12, kl_warmup_init=0.01), First()
    fit(Classifier(net=network()), *[WarmStart(path), callback][::order], first, max_epochs=2)
    assert_same_bits(first.weights, weights(source))
    assert first.epoch == 0
    assert callback.optimizer.num_updates == 12
    bayesian = {name for name, _ in source.named_parameters() if not name.startswith("net.1.")}  # all but the norm
    assert set(callback.optimizer.posterior().mean) == bayesian


def test_sizes_for_the_noise_floor_are_those_of_the_loaded_weights(trained):
    source, path = trained
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(100)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"] = source.state_dict()
    torch.save(checkpoint, path)
    callback = VOGNCallback()
    fit(Classifier(net=network()), WarmStart(path), callback, max_epochs=None, max_steps=1)
    size = callback.optimizer.state[callback.optimizer.model.net[0].weight]["initial_rms"]
    torch.testing.assert_close(size, source.net[0].weight.detach().square().mean().sqrt())


def test_a_resumed_fit_keeps_its_own_weights(trained, tmp_path):
    _, path = trained
    module = Classifier(net=network())
    fit(module, VOGNCallback(), max_epochs=1).save_checkpoint(tmp_path / "vogn.ckpt")
    first = First()
    trainer = quiet_trainer(WarmStart(path), VOGNCallback(), first, max_epochs=2)
    trainer.fit(Classifier(net=network()), loader(), ckpt_path=tmp_path / "vogn.ckpt")
    assert_same_bits(first.weights, weights(module))
    assert first.epoch == 1


def test_a_test_is_not_touched(trained):
    class Tested(Classifier):
        def test_step(self, batch, batch_idx):
            self(batch[0])

    module = Tested(net=network())
    before = weights(module)
    quiet_trainer(WarmStart(trained[1])).test(module, loader(), verbose=False)
    assert_same_bits(weights(module), before)


def test_another_architecture_is_refused_with_all_that_differs(trained):
    match = (
        r"ogn\.ckpt, which is not a Classifier of this architecture \(missing: net\.2\.bias, net\.2\.weight; "
        r"unknown to the model: net\.1\.bias, .*\)\. Build the module"
    )
    module = Classifier(net=mlp())
    before = weights(module)
    with pytest.raises(PosteriorError, match=match):
        fit(module, WarmStart(trained[1]))
    assert_same_bits(weights(module), before)


def test_a_checkpoint_that_is_not_there_is_to_be_trained_first(tmp_path):
    match = r"found no checkpoint .*first\.ckpt below .*\. First train the network to start from"
    with pytest.raises(PosteriorError, match=match):
        fit(Classifier(net=network()), WarmStart(tmp_path / "first.ckpt"), VOGNCallback())
