"""Image corruptions by kind and severity, to evaluate predictions under distribution shift.

They follow CIFAR-10-C (Hendrycks & Dietterich 2019, https://arxiv.org/abs/1903.12261), but are computed on the fly. The
strengths of noise, Gaussian blur, brightness, contrast and JPEG are the published values. The images differ from CIFAR-10-C,
so results are comparable with each other, but not with published results. With x in [0, 1] and standard normal noise ε:

    gaussian_noise   x + c ε                            brightness   x + c
    shot_noise       Poisson(c x) / c                   contrast     c (x - mean) + mean, mean over pixels
    speckle_noise    x + c x ε                          fog          (x + c f) m / (m + c), f smooth noise, m = max x
    impulse_noise    a fraction c of values 0 or 1      elastic      x displaced by a smooth field of c pixels
    gaussian_blur    width c pixels                     pixelate     resized by c (area) and back (nearest)
    defocus_blur     disk of radius c pixels            jpeg         compressed at quality c
    motion_blur      line of length c pixels            zoom_blur    mean over magnifications 1 to c

Lengths in pixels refer to images of height 32 and scale with the height.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import HyperparameterError

SEVERITIES: Final = (1, 2, 3, 4, 5)


@final
@dataclass(frozen=True)
class Corruption:
    """One kind of corruption at one severity. It is deterministic per image index, regardless of the order of images.

    Args:
        kind: One of `corruption_kinds`.
        severity: From 1 (weakest) to 5.

    Raises:
        HyperparameterError: If the kind or severity is unknown.

    Example:
        >>> grey = torch.full((3, 32, 32), 128, dtype=torch.uint8)
        >>> Corruption("brightness", severity=4)(grey, index=0)[0, 0, 0]
        tensor(179, dtype=torch.uint8)
    """

    kind: str
    severity: int

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.kind not in _KINDS or self.severity not in SEVERITIES:
            raise HyperparameterError(
                f"There is no corruption {self.kind!r} of severity {self.severity}. Kinds are {', '.join(_KINDS)}, with "
                "severities 1 to 5."
            )

    def __call__(self, image: Tensor, index: int) -> Tensor:
        """Corrupt a uint8 image ``[1 or 3, height, width]``. Its `index` in the data set seeds the randomness."""
        function, strengths = _KINDS[self.kind]
        # The seed does not depend on the severity, so that the same noise pattern gets stronger.
        seed = (zlib.crc32(self.kind.encode()) + 0x9E3779B1 * index) % 2**32
        corrupted = function(image / 255, strengths[self.severity - 1], Generator().manual_seed(seed))
        return corrupted.clamp(0, 1).mul(255).round().to(torch.uint8)


def corruption_kinds() -> list[str]:
    """The names of all corruptions, ordered as noise, blur, weather and digital."""
    return list(_KINDS)


def _noise(image: Tensor, generator: Generator) -> Tensor:
    return torch.randn(image.shape, generator=generator)


def _gaussian_noise(image: Tensor, strength: float, generator: Generator) -> Tensor:
    return image + strength * _noise(image, generator)


def _shot_noise(image: Tensor, photons: float, generator: Generator) -> Tensor:
    return torch.poisson(image * photons, generator=generator) / photons


def _speckle_noise(image: Tensor, strength: float, generator: Generator) -> Tensor:
    return image + strength * image * _noise(image, generator)


def _impulse_noise(image: Tensor, fraction: float, generator: Generator) -> Tensor:
    selector, value = torch.rand(2, *image.shape, generator=generator)
    return torch.where(selector < fraction, value.round(), image)


def _gaussian_blur(image: Tensor, width: float, generator: Generator) -> Tensor:
    return _blurred(image, width * _scale(image))


def _defocus_blur(image: Tensor, radius: float, generator: Generator) -> Tensor:
    radius *= _scale(image)
    rows, columns = _offsets(radius + 0.5)
    return _filtered(image, (radius + 0.5 - torch.hypot(rows, columns)).clamp(0, 1))  # with a soft edge


def _motion_blur(image: Tensor, length: float, generator: Generator) -> Tensor:
    half = length * _scale(image) / 2
    angle = math.pi * torch.rand((), generator=generator).item()
    rows, columns = _offsets(half)
    along = rows * math.sin(angle) + columns * math.cos(angle)
    across = rows * math.cos(angle) - columns * math.sin(angle)
    return _filtered(image, (1 - torch.hypot(across, (along.abs() - half).clamp(min=0))).clamp(min=0))


def _zoom_blur(image: Tensor, largest: float, generator: Generator) -> Tensor:
    zooms = torch.linspace(1, largest, 8).tolist()
    bilinear = InterpolationMode.BILINEAR
    return torch.stack([functional.affine(image, 0, [0, 0], zoom, [0, 0], bilinear) for zoom in zooms]).mean(0)


def _fog(image: Tensor, strength: float, generator: Generator) -> Tensor:
    size, brightest = image.shape[-2:], image.max()
    layers = [
        F.interpolate(torch.rand(1, 1, cells, cells, generator=generator), size, mode="bilinear")[0] / cells
        for cells in (3, 6, 12, 24)
    ]
    fog = torch.stack(layers).sum(0)
    fog = (fog - fog.min()) / (fog.max() - fog.min())
    return (image + strength * fog) * brightest / (brightest + strength)


def _brightness(image: Tensor, shift: float, generator: Generator) -> Tensor:
    return image + shift


def _contrast(image: Tensor, factor: float, generator: Generator) -> Tensor:
    mean = image.mean((1, 2), keepdim=True)
    return factor * (image - mean) + mean


def _elastic(image: Tensor, distance: float, generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    field = _blurred(torch.randn(2, height, width, generator=generator), height / 8)
    field = field / field.square().mean().sqrt() * distance * _scale(image)  # root mean square, in pixels
    grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, height, width], align_corners=False)
    grid = grid + torch.stack([field[0] * 2 / width, field[1] * 2 / height], -1)  # grid coordinates span [-1, 1]
    return F.grid_sample(image[None], grid, padding_mode="reflection", align_corners=False)[0]


def _pixelate(image: Tensor, factor: float, generator: Generator) -> Tensor:
    size = image.shape[-2:]
    small = F.interpolate(image[None], [max(1, round(factor * n)) for n in size], mode="area")
    return F.interpolate(small, size, mode="nearest")[0]


def _jpeg(image: Tensor, quality: float, generator: Generator) -> Tensor:
    pil_image = functional.to_pil_image(image.mul(255).round().to(torch.uint8))
    compressed: Tensor = functional.pil_to_tensor(functional.jpeg(pil_image, int(quality)))
    return compressed / 255


_KINDS: Final[dict[str, tuple[Callable[[Tensor, float, Generator], Tensor], tuple[float, ...]]]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": (_speckle_noise, (0.06, 0.10, 0.12, 0.16, 0.20)),
    "gaussian_blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "defocus_blur": (_defocus_blur, (0.7, 0.9, 1.1, 1.5, 2.0)),
    "motion_blur": (_motion_blur, (1.0, 2.0, 3.0, 4.5, 6.0)),
    "zoom_blur": (_zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
    "fog": (_fog, (0.2, 0.5, 0.75, 1.0, 1.5)),
    "brightness": (_brightness, (0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (_contrast, (0.75, 0.50, 0.40, 0.30, 0.15)),
    "elastic": (_elastic, (0.2, 0.35, 0.5, 0.75, 1.0)),
    "pixelate": (_pixelate, (0.50, 0.40, 0.33, 0.25, 0.20)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}


def _scale(image: Tensor) -> float:
    return image.shape[-2] / 32


def _offsets(reach: float) -> tuple[Tensor, Tensor]:
    """Row and column offsets from the centre of a square kernel that covers the radius `reach`."""
    steps = torch.arange(-math.ceil(reach), math.ceil(reach) + 1.0)
    return steps[:, None].expand(-1, len(steps)), steps.expand(len(steps), -1)


def _filtered(image: Tensor, kernel: Tensor) -> Tensor:
    channels, reach = len(image), len(kernel) // 2
    padded = F.pad(image[None], [reach] * 4, mode="reflect")
    return F.conv2d(padded, (kernel / kernel.sum()).expand(channels, 1, -1, -1), groups=channels)[0]


def _blurred(image: Tensor, width: float) -> Tensor:
    reach = min(math.ceil(3 * width), min(image.shape[-2:]) - 1)  # reflection padding must be smaller than the image
    blurred: Tensor = functional.gaussian_blur(image, [2 * reach + 1, 2 * reach + 1], [width, width])
    return blurred
