"""A network or a step that changes its batch or its weights in place does so as in plain Lightning's single pass."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from posterior_around import mean_field_around
from tiny_training import CLASSES, Classifier, assert_same_bits, fit, quiet_trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    BatchNormRecalibration,
    Calibration,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    MultiModeCallback,
    NoisyKFACCallback,
    SWAGCallback,
    VOGNCallback,
    laplace,
    mc_predict,
)
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import calibrate
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.zoo import BayesClassifier

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
OFFSET = 100.0


class Shifts(nn.Module):
    """Moves its inputs in place, and notes how often they have been moved before."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))
        self.moves = []

    def forward(self, x):
        x += OFFSET
        self.moves.append(round(x.mean().item() / OFFSET))
        return self.layers(x - OFFSET)


def module():
    torch.manual_seed(0)
    return BayesClassifier(Shifts(), num_classes=2, optimizer=lambda p: torch.optim.Adam(p, 1e-2))


def loader():
    return DataLoader(TensorDataset(X, Y), 12)


CALLBACKS = [
    lambda: [VOGNCallback()],
    lambda: [VOGNCallback(), Calibration(refit=True), BatchNormRecalibration(batches=2)],
    lambda: [LaplaceCallback(subset="all")],
    lambda: [SWAGCallback()],
    lambda: [MCDropoutCallback()],
    lambda: [MultiModeCallback(num_modes=2)],
]


@pytest.mark.filterwarnings("ignore:The search for the prior precision:UserWarning")
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_a_network_moves_each_batch_once(callbacks):
    fitted, trainer = module(), quiet_trainer(*callbacks(), max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(fitted, loader(), loader())
    trainer.test(fitted, loader(), verbose=False)
    trainer.predict(fitted, loader())
    assert set(fitted.model.moves) == {1}


class InStep(BayesClassifier):
    """Normalises the batch in place, and takes the labels out of it."""

    def __init__(self):
        super().__init__(nn.Linear(4, 2), num_classes=2, optimizer=lambda p: torch.optim.Adam(p, 1e-2))
        self.moves = []

    def training_step(self, batch, batch_idx):
        labels = batch.pop()
        self.moves.append(round(batch[0].add_(OFFSET).mean().item() / OFFSET))
        return F.cross_entropy(self(batch[0] - OFFSET), labels)


@pytest.mark.parametrize("callback", [VOGNCallback, lambda **kwargs: IVONCallback(lr=0.1, **kwargs)])
def test_each_pass_of_an_update_gets_the_batch_of_the_loader(callback):
    fitted = InStep()
    quiet_trainer(callback(mc_samples=3), max_epochs=1).fit(fitted, loader(), loader())
    assert fitted.moves == [1] * 12


def test_laplace_takes_labels_that_the_step_changes_in_place():
    class From1(Classifier):
        def training_step(self, batch, batch_idx):
            batch[1].sub_(1)
            return super().training_step(batch, batch_idx)

    fitted, callback = From1(), LaplaceCallback(prior_precision=1.0)
    fit(fitted, callback, data=DataLoader(TensorDataset(X, Y + 1), 12))
    expected = laplace(fitted.eval(), loader(), prior_precision=1.0, require_trained=False)
    assert callback.result.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood)


def test_what_plain_lightning_changes_is_changed_once_for_the_step():
    x = X.clone()
    call = Repeatable(Shifts().eval(), x)
    first, second = call(), call()
    torch.testing.assert_close(x, X + OFFSET)
    assert torch.equal(first, second)


def test_functions_for_plain_pytorch_move_each_batch_once():
    net = Shifts().eval()
    posterior = mean_field_around(net, 1e4)
    with torch.no_grad():
        mc_predict(net, posterior, X.clone(), samples=4, link="classification", recalibrate_on=[X.clone()])
        calibrate(net, posterior, [(X.clone(), Y)], samples=4, link="classification", recalibrate_on=[X.clone()])
    assert set(net.moves) == {1}


def copies(module):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/4165: a target network."""
    module.target.load_state_dict(module.net.state_dict())


def averages(module):
    for slow, fast in zip(module.target.parameters(), module.net.parameters(), strict=True):
        slow.mul_(0.9).add_(fast, alpha=0.1)


def clamps(module):
    module.net[2].weight.clamp_(min=-0.1)


def renorms(module):
    """https://github.com/braindecode/braindecode/pull/680: a limit on the norms of a layer's rows."""
    module.net[0].weight.data = torch.renorm(module.net[0].weight.data, p=2, dim=0, maxnorm=0.5)


def clamps_data(module):
    """https://arxiv.org/abs/1701.07875, Algorithm 1: the clipped weights of a critic."""
    for param in module.net.parameters():
        param.data.clamp_(-0.1, 0.1)


def copies_data(module):
    for target, param in zip(module.target.parameters(), module.net.parameters(), strict=True):
        target.data.copy_(param.data)


def deep_copies(module):
    module.target = copy.deepcopy(module.net)


def of_all(module):
    return torch.optim.Adam(module.parameters(), 1e-2)


def of_net(module):
    return torch.optim.Adam(module.net.parameters(), 1e-2)


def still(module):
    return torch.optim.SGD(module.parameters(), 0.0)


class ChangesWeights(Classifier):
    def __init__(self, change, configure):
        super().__init__(configure)
        self.change, self.target = change, copy.deepcopy(self.net)
        self.steps = nn.Parameter(torch.zeros(CLASSES))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.change(self)
            self.steps.add_(1)
            bootstrapped = self.target(batch[0]).softmax(1)
        return super().training_step(batch, batch_idx) + F.cross_entropy(self(batch[0]), bootstrapped)


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback])
@pytest.mark.parametrize("change", [copies, copies_data, averages, clamps, clamps_data, renorms])
def test_what_a_step_does_to_weights_stays_as_in_plain_lightning(change, callback):
    plain, noisy = ChangesWeights(change, of_all), ChangesWeights(change, of_all)
    fit(plain, max_epochs=3)
    fit(noisy, callback(relative_noise=1e-12), max_epochs=3)
    assert_same_bits(weights(noisy), weights(plain))


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback, lambda: VOGNCallback(antithetic=True)])
def test_the_mean_takes_what_a_step_adds_to_its_sample(callback):
    module = ChangesWeights(lambda module: None, of_all)
    fit(module, callback(), max_epochs=3)
    torch.testing.assert_close(module.steps.detach(), torch.full((CLASSES,), 18.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback, partial(VOGNCallback, antithetic=True)])
def test_the_mean_takes_what_a_step_adds_to_the_data_of_its_sample(callback):
    def adds(module):
        module.steps.data.add_(1)
        module.net[2].weight.data.mul_(2).div_(2)  # the same values

    module, without = ChangesWeights(adds, still), ChangesWeights(lambda module: None, still)
    fit(module, callback(relative_noise=0.3), max_epochs=3)
    torch.testing.assert_close(module.steps.detach(), torch.full((CLASSES,), 36.0), rtol=1e-5, atol=0)
    assert torch.equal(module.net[2].weight, without.net[2].weight)


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback])
@pytest.mark.parametrize(
    ("change", "configure"),
    [(copies, of_all), (copies, of_net), (copies_data, of_all), (copies_data, of_net), (deep_copies, of_net)],
)
def test_a_target_network_is_a_copy_of_the_mean(change, configure, callback):
    class Notes(ChangesWeights):
        def on_train_batch_start(self, batch, batch_idx):
            self.before = [param.detach().clone() for param in self.net.parameters()]

        def on_before_optimizer_step(self, optimizer):
            assert all(map(torch.equal, self.target.parameters(), self.before))

    fit(Notes(change, configure), callback(relative_noise=0.3), max_epochs=3)


def test_a_trained_layer_that_is_replaced_is_refused():
    with pytest.raises(UnsupportedTrainingError, match=r"shape \[6, 4\] is no longer part of ChangesWeights"):
        fit(ChangesWeights(deep_copies, of_all), VOGNCallback(), max_epochs=3)


def test_a_step_that_freezes_a_layer_adds_no_noise_to_the_mean():
    def freezes(module):
        module.net[0].requires_grad_(False)
        module.net[2].weight.data.mul_(2).div_(2)

    module, without = ChangesWeights(freezes, still), ChangesWeights(freezes, still)
    fit(module, VOGNCallback(relative_noise=0.3), max_epochs=1)
    assert torch.equal(module.net[2].weight, without.net[2].weight)
