"""Losses of one example at a time, stacked by hand, train as the same loss of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import CLASSES, Classifier, assert_close, fit, weights

from lightning_bayes import VOGNCallback

LOSSES = {
    "cross_entropy": F.cross_entropy,
    "soft labels": lambda outputs, y: F.cross_entropy(outputs, F.one_hot(y, CLASSES).float()),
    "nll_loss": lambda outputs, y: F.nll_loss(outputs.log_softmax(-1), y),
    "mse_loss": lambda outputs, y: F.mse_loss(outputs, F.one_hot(y, CLASSES).float()),
    "binary labels": lambda outputs, y: F.binary_cross_entropy_with_logits(outputs, F.one_hot(y, CLASSES).float()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_posterior_is_that_of_the_loss_of_the_batch(name):
    def of_each(outputs, targets):
        return torch.stack([LOSSES[name](*each) for each in zip(outputs, targets, strict=True)]).mean()

    found, kinds = [], []
    for loss in (of_each, LOSSES[name]):
        module, callback = Classifier(loss=loss), VOGNCallback(loss_reduction="mean")
        fit(module, callback)
        found.append({**weights(module), **{f"s.{n}": v for n, v in callback.optimizer.posterior().precision.items()}})
        kinds.append(callback.likelihood_of(module).only.kind.state())
    assert_close(*found, rtol=1e-4, atol=1e-6)
    assert kinds[0] == kinds[1]
