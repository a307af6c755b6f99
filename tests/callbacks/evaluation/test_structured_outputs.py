"""Outputs of several tensors: each leaf is averaged by its own likelihood, in the structure that forward returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from posterior_around import outputs_of_samples
from tiny_training import Classifier, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import DeepEnsembleCallback, VOGNCallback

S = 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=GENERATOR)
LABEL = torch.randint(3, (24,), generator=GENERATOR)
VALUE = torch.randn(24, 2, generator=GENERATOR)
LOADER = DataLoader(TensorDataset(X, LABEL, VALUE), 12)


class Pair(NamedTuple):
    logits: Tensor
    value: Tensor


@dataclass
class Both:
    logits: Tensor
    value: Tensor


STRUCTURES = {
    "tuple": lambda a, b: (a, b),
    "dictionary": lambda a, b: {"logits": a, "value": b},
    "named tuple": Pair,
    "dataclass": Both,
    "nested": lambda a, b: {"heads": [a, {"value": b}]},
}


def leaves(output):
    """The logits and the values of any structure above."""
    if isinstance(output, dict):
        output = list(output.values())
        output = output[0] if len(output) == 1 else output
    first, second = (output.logits, output.value) if isinstance(output, Both) else output
    return first, second["value"] if isinstance(second, dict) and "value" in second else second


class Net(Classifier):
    """Two heads, one of classes and one of values; test steps keep what they see."""

    def __init__(self, structure=STRUCTURES["tuple"]):
        torch.manual_seed(0)
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.05), nn.Sequential(nn.Linear(3, 8), nn.Tanh()))
        self.classes, self.values, self.structure, self.seen = nn.Linear(8, 3), nn.Linear(8, 2), structure, []

    def forward(self, x):
        return self.structure(self.classes(self.net(x)), self.values(self.net(x)))

    def training_step(self, batch, index):
        logits, value = leaves(self(batch[0]))
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(value, batch[2])

    def test_step(self, batch, index):
        self.seen.append(self(batch[0]))


def fitted(net, callback=None):
    callback = callback or VOGNCallback(eval_samples=S, relative_noise=0.3, calibrate=False)
    trainer = quiet_trainer(callback, max_epochs=3)
    trainer.fit(net, LOADER)
    return trainer, callback


def by_hand(net, callback):
    return outputs_of_samples(net, callback.optimizer.posterior(), X, S, callback.seed)


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_leaf_is_averaged_by_its_own_likelihood(name):
    net = Net(STRUCTURES[name])
    trainer, callback = fitted(net)
    trainer.test(net, LOADER, verbose=False)
    each = [leaves(output) for output in by_hand(net, callback)]
    probs = torch.stack([logits for logits, _ in each]).softmax(-1).mean(0)
    values = torch.stack([value for _, value in each])
    seen = [leaves(output) for output in net.seen]
    assert type(net.seen[0]) is type(net.structure(X, X))
    torch.testing.assert_close(torch.cat([logits for logits, _ in seen]), probs.log())
    torch.testing.assert_close(torch.cat([value for _, value in seen]), values.mean(0))
    predicted = [leaves(batch) for batch in trainer.predict(net, DataLoader(X, 12))]
    torch.testing.assert_close(torch.cat([classes["probs"] for classes, _ in predicted]), probs)
    torch.testing.assert_close(torch.cat([value["mean"] for _, value in predicted]), values.mean(0))
    torch.testing.assert_close(torch.cat([value["variance"] for _, value in predicted]), values.var(0, correction=0))


class Boxes(Net):
    """Detections: the number of boxes depends on the weights, and so do the classes."""

    def forward(self, x):
        logits, value = super().forward(x)
        kept = value[:, 0] > value[:, 0].mean()
        kept[0] = True
        return {"logits": logits, "value": value, "boxes": value[kept], "label": logits.argmax(-1), "name": "boxes"}

    def training_step(self, batch, index):
        output = self(batch[0])
        return F.cross_entropy(output["logits"], batch[1]) + F.mse_loss(output["value"], batch[2])


def test_what_has_no_average_is_the_mean_networks_and_said_once(caplog):
    net = Boxes()
    trainer, callback = fitted(net)
    trainer.test(net, DataLoader(TensorDataset(X, LABEL, VALUE), 24), verbose=False)
    (seen,) = net.seen
    with torch.no_grad():
        at_mean = net.eval()(X)
    torch.testing.assert_close(seen["boxes"], at_mean["boxes"])
    assert seen["name"] == "boxes"
    votes = torch.stack([output["label"] for output in by_hand(net, callback)])
    assert torch.equal(seen["label"], votes.mode(0).values)
    assert caplog.text.count("Boxes.forward returns values that have no average over samples (boxes, name)") <= 1


def test_members_of_an_ensemble_are_averaged_leaf_by_leaf(tmp_path):
    nets = [Net(), Net()]
    for index, net in enumerate(nets):
        torch.manual_seed(index)
        for layer in (net.net[0], net.classes, net.values):
            layer.reset_parameters()
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(net, LOADER)
        trainer.save_checkpoint(tmp_path / f"{index}.ckpt")
    ensemble, net = DeepEnsembleCallback([str(tmp_path / f"{index}.ckpt") for index in (0, 1)]), Net()
    quiet_trainer(ensemble).test(net, LOADER, verbose=False)
    with torch.no_grad():
        values = torch.stack([each.eval()(X)[1] for each in nets])
    torch.testing.assert_close(torch.cat([value for _, value in net.seen]), values.mean(0))
