"""The input transform against torchvision's presets, PIL and plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import AlexNet_Weights, ResNet18_Weights, VGG16_Weights
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.zoo.sources import transform_of
from lightning_bayes.zoo.transforms import ImageTransform, as_tensor, with_channels


def bytes_image(*shape, seed=0):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 300, 400), (3, 400, 300), (3, 256, 256), (3, 60, 90)])
@pytest.mark.parametrize("weights", [AlexNet_Weights, ResNet18_Weights, VGG16_Weights], ids=lambda w: w.__name__)
def test_equals_torchvisions_transform_of_the_weights(weights, shape):
    preset = weights.IMAGENET1K_V1.transforms()
    image = bytes_image(*shape)
    # torchvision's v1 and v2 functions round resized uint8 differently; one of 255 is 0.0175 after normalisation.
    torch.testing.assert_close(transform_of(preset)(image), preset(image), rtol=0, atol=0.0176)
    assert transform_of(preset) == ImageTransform(224, resize=256)


def test_an_image_of_the_right_size_is_only_normalised():
    image = bytes_image(3, 8, 8)
    got = ImageTransform(8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))(image)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 0.6), (0.3, 0.7)]):
        expected = (image[channel].double() / 255 - mean) / std
        torch.testing.assert_close(got[channel].double(), expected, rtol=1e-5, atol=1e-6)


def test_uint8_and_float_images_are_equivalent():
    image, transform = bytes_image(3, 8, 8), ImageTransform(8)
    torch.testing.assert_close(transform(image), transform(image / 255))


def test_the_centre_of_the_resized_image_is_kept():
    image = torch.zeros(1, 20, 40, dtype=torch.uint8)
    image[:, :, 10:30] = 200  # the middle square
    assert (ImageTransform(20, mean=(0.0,), std=(1.0,)).crop(image) == 200).all()


def test_a_batch_is_transformed_image_by_image():
    images, transform = bytes_image(4, 3, 30, 40), ImageTransform(16, resize=20)
    torch.testing.assert_close(transform(images), torch.stack([transform(image) for image in images]))


@pytest.mark.parametrize(
    ("mode", "channels"), [("RGB", 3), ("RGBA", 3), ("P", 3), ("CMYK", 3), ("L", 1), ("1", 1), ("LA", 1)]
)
def test_a_greyscale_pil_image_has_one_channel_others_have_three(mode, channels):
    image = Image.fromarray(bytes_image(5, 7, 3).numpy()).convert(mode)
    assert as_tensor(image).shape == (channels, 5, 7)
    assert ImageTransform(5)(image).shape == (3, 5, 5)


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_16_bits_are_rounded_to_8(order):
    """Black and white are the same at both depths."""
    deep = np.arange(0, 65536, 15, dtype=order).reshape(19, 230)
    pixels = as_tensor(Image.fromarray(deep))
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (1, 19, 230))
    assert np.abs(pixels[0].numpy() / 255 - deep / 65535).max() <= 0.5 / 255
    assert (pixels.min(), pixels.max()) == (0, 255)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_32_bit_pixels_are_rejected(mode):
    with pytest.raises(DataError, match=rf"image of mode {mode} has 32-bit pixels.* Convert the image to 8 bits"):
        ImageTransform(5)(Image.new(mode, (5, 5)))


def test_a_colour_image_from_pil_keeps_its_bytes_and_the_order_of_channels():
    pixels = bytes_image(3, 5, 7)
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    assert torch.equal(as_tensor(image), pixels)


def test_greyscale_and_colour_can_be_converted():
    grey = bytes_image(1, 4, 4)
    assert torch.equal(with_channels(grey, 3), torch.cat([grey] * 3))
    colour = torch.tensor([200, 100, 50], dtype=torch.uint8)[:, None, None].expand(3, 2, 2)
    expected = 0.299 * 200 + 0.587 * 100 + 0.114 * 50  # ITU-R BT.601
    assert (with_channels(colour, 1).double() - expected).abs().max() <= 1
    assert torch.equal(with_channels(colour, 3), colour)


@pytest.mark.parametrize(("shape", "channels"), [((4, 8, 8), 3), ((2, 8, 8), 1), ((8, 8), 3), ((3, 8, 8), 2)])
def test_unsupported_numbers_of_channels_are_rejected(shape, channels):
    with pytest.raises(ShapeError, match=rf"cannot be converted to {channels} channels\. Only greyscale"):
        with_channels(torch.zeros(shape), channels)


def test_converts_to_a_dictionary_of_plain_values(tmp_path):
    transform = ImageTransform(16, (0.5,), (0.25,), resize=20, interpolation="bicubic")
    torch.save(transform.to_dict(), tmp_path / "transform.pt")
    assert ImageTransform(**torch.load(tmp_path / "transform.pt", weights_only=True)) == transform


def test_uses_the_stated_interpolation():
    image = bytes_image(3, 30, 30)
    bicubic = ImageTransform(10, interpolation="bicubic").crop(image)
    assert torch.equal(bicubic, functional.resize(image, [10], functional.InterpolationMode.BICUBIC, antialias=True))
    assert not torch.equal(bicubic, ImageTransform(10).crop(image))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 8, "interpolation": "cubic"}, r"interpolation='cubic' is unknown; use one of nearest,"),
        ({"image_size": 8, "resize": 7}, r"resize=7 and image_size=8 are inconsistent"),
        ({"image_size": 0}, r"resize=None and image_size=0 are inconsistent"),
        (
            {"image_size": 8, "mean": (0.5, 0.5), "std": (1.0, 1.0)},
            r"mean=\(0\.5, 0\.5\) and std=.* must each have one entry",
        ),
        (
            {"image_size": 8, "mean": (0.5,)},
            r"mean=\(0\.5,\) and std=\(0\.229, .* must each have one entry for greyscale or three",
        ),
        ({"image_size": 8, "mean": (0.5,), "std": (0.0,)}, r"each std must be positive"),
    ],
)
def test_inconsistent_values_are_rejected(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        ImageTransform(**arguments)
