"""Nothing is read from a user's module by a common name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import mean_squares
from tiny_training import Classifier, assert_close, fit, loader
from torch import nn

from lightning_bayes import VOGNCallback, measure

NAMES = ("temperature", "scale", "threshold", "samples", "averages", "reject_below")


@pytest.mark.parametrize("name", NAMES)
def test_predictions_do_not_depend_on_an_attribute_of_a_common_name(name):
    predictions = []
    for value in (None, 0.07):
        torch.manual_seed(0)
        module = Classifier()
        if value is not None:
            setattr(module, name, value)
        trainer = fit(module, VOGNCallback(), max_epochs=1)
        predictions.append(torch.cat([batch["probs"] for batch in trainer.predict(module, loader())]))
    assert torch.equal(*predictions)


def test_a_method_of_a_common_name_is_left_alone():
    class Named(Classifier):
        def temperature(self):
            return 0.07

    module = Named()
    trainer = fit(module, VOGNCallback(), max_epochs=1)
    assert trainer.predict(module, loader())[0]["probs"].sum(1).allclose(torch.ones(1))


class Scaled(nn.Module):
    """Batch-first, whatever the attribute says: it is for a layer that the module builds later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.out, self.batch_first = nn.Parameter(torch.randn(3)), nn.Linear(3, 1), False

    def forward(self, x):
        return self.out((x * self.scale).tanh()).mean((1, 2))


def test_the_examples_of_a_users_module_do_not_depend_on_batch_first():
    generator = torch.Generator().manual_seed(0)
    model, x, y = Scaled(), torch.randn(8, 5, 3, generator=generator), torch.randn(8, generator=generator)
    found = measure(model, lambda: F.mse_loss(model(x), y), "squared_gradients").curvature
    expected = mean_squares(model, [(model(x[[i]]) - y[i]).square().sum() for i in range(8)])
    assert_close(found, expected, rtol=1e-4, atol=1e-7)
