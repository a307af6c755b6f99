"""A network or a step that changes its batch in place finds it in each pass as in plain Lightning's single pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    BatchNormRecalibration,
    Calibration,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    MultiModeCallback,
    SWAGCallback,
    VOGNCallback,
    mc_predict,
)
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.posteriors import MeanField
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


def test_laplace_refuses_labels_that_the_step_changes_in_place():
    class From1(Classifier):
        def training_step(self, batch, batch_idx):
            batch[1].sub_(1)
            return super().training_step(batch, batch_idx)

    from_1 = DataLoader(TensorDataset(X, Y + 1), 12)
    with pytest.raises(UnsupportedTrainingError, match="targets"):
        quiet_trainer(LaplaceCallback(), max_epochs=1).fit(From1(), from_1)


def test_what_plain_lightning_changes_is_changed_once_for_the_step():
    x = X.clone()
    call = Repeatable(Shifts().eval(), x)
    first, second = call(), call()
    torch.testing.assert_close(x, X + OFFSET)
    assert torch.equal(first, second)


def test_functions_for_plain_pytorch_move_each_batch_once():
    net = Shifts().eval()
    mean = {name: p.detach() for name, p in net.named_parameters()}
    precision = {name: torch.full_like(value, 1e4) for name, value in mean.items()}
    posterior = MeanField(mean, precision, dict.fromkeys(mean, 1.0), 48, dict(net.named_buffers()))
    with torch.no_grad():
        mc_predict(net, posterior, X.clone(), samples=4, recalibrate_on=[X.clone()])
        calibrate(net, posterior, [(X.clone(), Y)], samples=4, recalibrate_on=[X.clone()])
    assert set(net.moves) == {1}
