"""Predictor against mc_predict: every kind of input gives the prediction of the same images put in by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from of_classes import mc_predict, save_posterior
from PIL import Image
from posterior_around import mean_field_around

from lightning_bayes import Predictor, zoo
from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.posteriors import ScaledPosterior

NAMES = ["cat", "dog", "eel"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    torch.manual_seed(0)
    model = zoo.create_model("mlp", num_classes=3, in_channels=3, image_size=8, hidden=(5,))
    path = tmp_path_factory.mktemp("files") / "q.safetensors"
    transform = zoo.ImageTransform(8, resize=9)
    save_posterior(path, model, mean_field_around(model, 30.0), transform=transform, class_names=NAMES, temperature=2.0)
    return path


@pytest.fixture
def pixels(generator):
    return torch.randint(0, 256, (2, 3, 12, 16), dtype=torch.uint8, generator=generator)


def by_hand(file, pixels, samples=6, **options):
    saved = zoo.load(file)
    return mc_predict(
        saved.model, saved.posterior, saved.transform(pixels), samples, temperature=saved.temperature, **options
    )


def hwc(pixels):
    return pixels.permute(*range(pixels.ndim - 3), -2, -1, -3).contiguous().numpy()


@pytest.mark.parametrize(
    "form",
    [
        lambda p, _: p,
        lambda p, _: hwc(p),
        lambda p, _: [Image.fromarray(hwc(one)) for one in p],
        lambda p, _: (hwc(p[0]), p[1]),
        lambda p, file: zoo.load(file).transform(p),
        lambda p, file: zoo.load(file).transform(p).double().numpy(),
    ],
    ids=["bytes", "numpy", "PIL", "mixed", "floats", "numpy floats"],
)
def test_every_form_of_the_images_gives_the_same_prediction(file, pixels, form):
    found, wanted = Predictor.load(file, samples=6)(form(pixels, file)), by_hand(file, pixels)
    for part in ("probs", "entropy", "mutual_information"):
        torch.testing.assert_close(getattr(found, part), getattr(wanted, part))
    assert found.labels == tuple(NAMES[c] for c in wanted.probs.argmax(1))
    assert found.reject is None


def test_one_image_is_a_batch_of_one(file, pixels, tmp_path):
    predict, wanted = Predictor.load(file, samples=6), by_hand(file, pixels[:1]).probs
    Image.fromarray(hwc(pixels[0])).save(tmp_path / "one.png")
    for image in (pixels[0], hwc(pixels[0]), Image.fromarray(hwc(pixels[0])), str(tmp_path / "one.png")):
        torch.testing.assert_close(predict(image).probs, wanted)
    grey = predict(np.zeros((8, 8), np.uint8))
    torch.testing.assert_close(grey.probs, by_hand(file, torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).probs)


def test_a_second_call_has_the_same_samples_and_leaves_the_mean(file, pixels):
    predict = Predictor.load(file, samples=3, seed=4)
    before = {name: value.clone() for name, value in predict.saved.model.state_dict().items()}
    first, second = predict(pixels), predict(pixels)
    assert torch.equal(first.probs, second.probs)
    torch.testing.assert_close(first.probs, by_hand(file, pixels, samples=3, seed=4).probs)
    assert all(torch.equal(value, before[name]) for name, value in predict.saved.model.state_dict().items())


def test_small_probabilities_are_rejected(file, pixels):
    largest = by_hand(file, pixels).probs.amax(1)
    between = largest.mean().item()
    assert torch.equal(Predictor.load(file, samples=6, reject_below=between)(pixels).reject, largest < between)
    assert (largest < between).sum() == 1


def test_a_regression_network_gives_mean_and_standard_deviation(tmp_path, generator):
    model = zoo.create_model("mlp", num_classes=1, in_channels=1, image_size=2, hidden=())
    posterior = ScaledPosterior(mean_field_around(model, 30.0), 0.5, linearized=True)
    save_posterior(tmp_path / "r.safetensors", model, posterior, link="identity")
    x = torch.randn(4, 1, 2, 2, generator=generator)
    found = Predictor.load(tmp_path / "r.safetensors", samples=5)(x)
    wanted = mc_predict(model, posterior, x, 5, link="identity")
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.std, wanted.variance.sqrt())
    assert found.std.min() > 0


def test_independent_labels_are_rejected_where_either_answer_is_unlikely(tmp_path, generator):
    model = zoo.create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=())
    save_posterior(tmp_path / "s.safetensors", model, mean_field_around(model, 30.0), link="sigmoid", class_names=NAMES)
    found = Predictor.load(tmp_path / "s.safetensors", samples=4, reject_below=0.7)(
        torch.randn(5, 1, 2, 2, generator=generator)
    )
    assert torch.equal(found.classes, (found.probs > 0.5).long())
    assert torch.equal(found.reject, (found.probs < 0.7) & (found.probs > 0.3))
    assert found.labels == ()  # several at once


def test_images_need_a_transform(tmp_path):
    model = zoo.create_model("mlp", num_classes=2, in_channels=1, image_size=2, hidden=())
    save_posterior(tmp_path / "t.safetensors", model, mean_field_around(model, 30.0))
    with pytest.raises(HyperparameterError, match=r"no transform.*Pass floats .* or save the file again"):
        Predictor.load(tmp_path / "t.safetensors")(np.zeros((2, 2), np.uint8))


@pytest.mark.parametrize(
    ("options", "message"), [({"samples": 0}, "samples=0"), ({"reject_below": 2}, "reject_below=2")]
)
def test_bad_options_are_named(file, options, message):
    with pytest.raises(HyperparameterError, match=message):
        Predictor.load(file, **options)


def test_an_empty_list_is_refused(file):
    with pytest.raises(ShapeError, match="empty"):
        Predictor.load(file)([])
