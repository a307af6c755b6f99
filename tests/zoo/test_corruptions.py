"""Corruptions against their definitions, in plain arithmetic or PIL, and properties shared by all of them."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_images

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.data.corruptions import SEVERITIES, Corruption, corruption_kinds

RANDOM = ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "motion_blur", "fog", "elastic"]
GREY = torch.full((3, 128, 128), 128, dtype=torch.uint8)


@pytest.fixture(scope="module")
def photo():
    """A 64 × 64 crop of a photograph."""
    return torch.tensor(load_sample_images().images[0][100:164, 200:264]).permute(2, 0, 1).contiguous()


def difference(one, other):
    return (one.double() - other.double()).abs().mean().item()


@pytest.mark.parametrize("kind", corruption_kinds())
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [28, 32, 64])
def test_returns_uint8_of_the_same_shape_and_does_not_change_the_image(kind, channels, size, photo):
    image = photo[:channels, :size, :size].contiguous()
    before = image.clone()
    corrupted = Corruption(kind, 3)(image, 0)
    assert corrupted.shape == image.shape
    assert corrupted.dtype == torch.uint8
    assert torch.equal(image, before)


@pytest.mark.parametrize("kind", corruption_kinds())
def test_a_higher_severity_changes_more(kind, photo):
    changes = [difference(Corruption(kind, severity)(photo, 0), photo) for severity in SEVERITIES]
    assert changes[0] > 0
    assert changes == sorted(set(changes))


@pytest.mark.parametrize("kind", corruption_kinds())
def test_depends_on_the_index_only(kind, photo):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    corruption = Corruption(kind, 4)
    first = [corruption(photo, index) for index in range(3)]
    again = [corruption(photo, index) for index in (2, 1, 0)][::-1]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert (not torch.equal(first[0], first[1])) == (kind in RANDOM)


@pytest.mark.parametrize(
    "kind", ["gaussian_blur", "defocus_blur", "motion_blur", "zoom_blur", "contrast", "elastic", "pixelate"]
)
def test_blur_and_geometry_do_not_change_a_constant_image(kind):
    assert torch.equal(Corruption(kind, 5)(GREY, 0), GREY)


@pytest.mark.parametrize(
    ("kind", "variance"),
    [
        ("gaussian_noise", 0.08**2),
        ("shot_noise", (128 / 255) / 100),  # of Poisson(c x) / c
        ("speckle_noise", (0.12 * 128 / 255) ** 2),
    ],
)
def test_noise_has_the_stated_mean_and_variance(kind, variance):
    values = torch.stack([Corruption(kind, 3)(GREY, index) for index in range(8)]).double() / 255
    variance += 1 / 12 / 255**2  # of rounding to bytes
    count = values.numel()
    assert (
        abs(values.mean().item() - 128 / 255) < 4 * math.sqrt(variance / count) + 1e-4
    )  # rounding favours neither side
    assert abs(values.var().item() / variance - 1) < 4 * math.sqrt(2.2 / count)  # kurtosis of Poisson(50) is 3.02


def test_impulses_are_black_or_white_and_as_many_as_stated():
    values = torch.stack([Corruption("impulse_noise", 5)(GREY, index) for index in range(8)])
    assert set(values.unique().tolist()) == {0, 128, 255}
    for value in (0, 255):
        assert abs((values == value).double().mean().item() - 0.035) < 4 * math.sqrt(0.035 * 0.965 / values.numel())


def test_brightness_shifts_and_contrast_shrinks_about_the_mean(photo):
    brighter = (photo.double() / 255 + 0.2).clamp(max=1) * 255
    assert (Corruption("brightness", 4)(photo, 0).double() - brighter).abs().max() < 0.51
    scaled = photo.double() / 255
    mean = scaled.mean((1, 2), keepdim=True)
    flat = (0.3 * (scaled - mean) + mean) * 255
    assert (Corruption("contrast", 4)(photo, 0).double() - flat).abs().max() < 0.51


def test_jpeg_is_the_file_that_pil_writes(photo):
    buffer = io.BytesIO()
    Image.fromarray(photo.permute(1, 2, 0).numpy()).save(buffer, "jpeg", quality=40)
    theirs = torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1)
    ours = Corruption("jpeg", 5)(photo, 0)
    assert difference(ours, theirs) < 0.02 * difference(ours, photo) + 0.5  # two decoders may round differently


def test_pixelate_repeats_pixels_of_a_smaller_image(photo):
    """At half of 64 pixels, each pixel is the mean of four."""
    corrupted = Corruption("pixelate", 1)(photo, 0)
    means = F.avg_pool2d(photo[None].double(), 2)
    assert (F.interpolate(means, scale_factor=2)[0] - corrupted).abs().max() < 0.51


@pytest.mark.parametrize("kind", ["gaussian_blur", "defocus_blur", "motion_blur"])
def test_a_blurred_point_is_a_kernel_of_the_stated_width(kind):
    """The spread of a bright point: for a Gaussian 2 c², for a disk of radius r about r²/2, for a line about L²/12."""
    image = torch.zeros(1, 32, 32, dtype=torch.uint8)
    image[:, 16, 16] = 255
    weights = Corruption(kind, 5)(image, 0)[0].double()
    weights /= weights.sum()
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    assert abs((weights * rows).sum() - 16) < 0.05
    assert abs((weights * columns).sum() - 16) < 0.05
    spread = (weights * ((rows - 16) ** 2 + (columns - 16) ** 2)).sum().item()
    low, high = {"gaussian_blur": (1.7, 2.3), "defocus_blur": (1.7, 2.9), "motion_blur": (2.5, 4.5)}[kind]
    assert low < spread < high


def test_lengths_scale_with_the_image():
    """In an image of 64 rows, the blur of a point is twice as wide, with four times the variance."""
    spreads = []
    for size in (32, 64):
        image = torch.zeros(1, size, size, dtype=torch.uint8)
        image[:, size // 2, size // 2] = 255
        weights = Corruption("defocus_blur", 5)(image, 0)[0].double()
        rows, columns = torch.meshgrid(*[torch.arange(size) - size // 2] * 2, indexing="ij")
        spreads.append(((weights * (rows**2 + columns**2)).sum() / weights.sum()).item())
    assert 3.0 < spreads[1] / spreads[0] < 4.5


def test_elastic_moves_by_the_stated_distance():
    """If the brightness equals the column index, the change in brightness is the shift in columns."""
    columns = torch.arange(64, dtype=torch.uint8) * 3 + 30
    image = columns.expand(1, 64, 64).contiguous()
    moved = [Corruption("elastic", 5)(image, index)[0, 8:-8, 8:-8].double() for index in range(20)]
    shifts = torch.stack([(m - image[0, 8:-8, 8:-8]) / 3 for m in moved])
    assert 0.6 < shifts.square().mean().sqrt() / 2 < 1.4  # 1 pixel in each direction at 32 rows is 2 at 64


def test_fog_brightens_the_dark_and_keeps_the_range(photo):
    corrupted = Corruption("fog", 5)(photo, 0)
    assert corrupted.max() <= photo.max()
    assert corrupted.double().std() < 0.8 * photo.double().std()
    assert Corruption("fog", 1)(torch.zeros(1, 32, 32, dtype=torch.uint8), 0).max() == 0  # 0 · fog


@pytest.mark.parametrize(("kind", "severity"), [("rain", 1), ("fog", 0), ("fog", 6)])
def test_unknown_kinds_and_severities_are_rejected(kind, severity):
    with pytest.raises(
        HyperparameterError, match=rf"no corruption '{kind}' of severity {severity}\. Kinds are gaussian_noise, "
    ):
        Corruption(kind, severity)
