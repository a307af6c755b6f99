"""Under autocast, uncertainty is computed in single precision: a mutual information is a difference of entropies."""

from __future__ import annotations

import pytest
import torch
from posterior_around import mean_field_around
from tiny_training import ValidatedClassifier, assert_same_bits, loader, quiet_trainer, weights

from lightning_bayes import SWAGCallback, VOGNCallback, mc_predict

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


@pytest.mark.parametrize("callback", [VOGNCallback, lambda: SWAGCallback(start=0.0)])
def test_predictions_under_bf16_have_single_precision(callback):
    module, trainer = ValidatedClassifier(), quiet_trainer(callback(), max_epochs=2, precision="bf16-mixed")
    trainer.fit(module, loader())
    for batch in trainer.predict(module, loader()):
        assert {value.dtype for value in batch.values()} == {torch.float32}
        torch.testing.assert_close(batch["probs"].sum(1), torch.ones(8), rtol=0, atol=1e-6)
        assert (batch["mutual_information"] > 0).all()


def test_samples_differ_under_autocast_without_inference_mode():
    model = torch.nn.Linear(4, 3)
    posterior = mean_field_around(model, 1.0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        prediction = mc_predict(model, posterior, torch.ones(2, 4), samples=4, link="classification")
    assert (prediction.mutual_information > 0.01).all()


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_without_noise_training_is_plain_lightnings(precision):
    modules = []
    for ours in ([], [VOGNCallback(relative_noise=1e-30)]):
        modules.append(ValidatedClassifier())
        quiet_trainer(*ours, max_epochs=2, precision=precision).fit(modules[-1], loader())
    assert_same_bits(*map(weights, modules))
