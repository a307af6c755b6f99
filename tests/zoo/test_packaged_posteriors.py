"""The posteriors in the wheel: small, loadable by name, and as good as their cards say."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from lightning_bayes import Predictor, mc_predict, zoo
from lightning_bayes.zoo.hub import PACKAGED, packaged_posteriors


@pytest.mark.parametrize("name", packaged_posteriors())
def test_a_posterior_in_the_wheel_is_small_and_predicts_with_uncertainty(name):
    assert (PACKAGED / f"{name}.safetensors").stat().st_size < 600_000
    saved = zoo.load(name)
    size = saved.transform.image_size
    prediction = Predictor(saved)(Image.radial_gradient("L").resize((size, size)))
    assert prediction.probs.sum().item() == pytest.approx(1, abs=1e-5)
    assert prediction.mutual_information.item() > 0


def test_the_accuracy_on_digits_is_that_of_the_card():
    saved = zoo.load("lenet5-digits")
    data = zoo.DigitsDataModule()
    data.setup("test")
    images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader()[0], strict=True))
    probs = mc_predict(saved.model, saved.posterior, images, samples=32, seed=0).probs
    accuracy = (probs.argmax(1) == labels).double().mean().item()
    assert accuracy == pytest.approx(saved.metrics["test/cls/Acc"], abs=0.01)  # three images of 350 by the draw
