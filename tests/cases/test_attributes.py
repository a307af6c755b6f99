"""Nothing is read from a user's module by a common name."""

from __future__ import annotations

import pytest
import torch
from tiny_training import Classifier, fit, loader

from lightning_bayes import VOGNCallback

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
