"""Digits for pretraining, and a few clothing or letter images for adaptation, 28 × 28 and normalised like the digits.

`--root` contains torchvision's folders ``MNIST`` and ``FashionMNIST``, and ``notMNIST`` with the files of
https://github.com/davidflanagan/notMNIST-to-MNIST: 10 000 letters A to J in many fonts, 1000 of each, from Bulatov's
notMNIST_small. A fixed random split divides that file into a pool and test images.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo import FashionMNISTDataModule, MNISTDataModule
from lightning_bayes.zoo.data.splits import few_shots, split_indices

SHOTS: Final = 100  # images for each of ten classes
HELD_OUT: Final = 2000  # images in a test set
VALIDATION: Final = 2000
_LETTERS: Final = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Images(NamedTuple):
    """Normalised images ``[N, 1, 28, 28]`` with their classes ``[N]``."""

    x: Tensor
    y: Tensor

    def at(self, indices: list[int]) -> Images:
        """The images at some indices."""
        return Images(self.x[indices], self.y[indices])


class Target(NamedTuple):
    """The data of an adaptation: a few training images, and test images."""

    train: Images
    test: Images


def digits(root: Path) -> Images:
    """All training digits of MNIST."""
    return _normalised(*MNISTDataModule.read(str(root), train=True))


def target(name: str, root: Path, seed: int, validate: bool = False, shots: int = SHOTS) -> Target:
    """Images to adapt to."""
    pool, test = TARGETS[name](root)
    order = torch.randperm(len(pool.y), generator=torch.Generator().manual_seed(seed)).tolist()
    train = few_shots(order, pool.y, shots)
    if validate:
        chosen = set(train)
        test = pool.at([index for index in order if index not in chosen][:VALIDATION])
    return Target(pool.at(train), test)


def unfamiliar(name: str, root: Path) -> dict[str, Tensor]:
    """Out-of-distribution test images by score ``[N, 1, 28, 28]``: the other target, and the digits of the pretraining."""
    (other,) = (read for key, read in TARGETS.items() if key != name)
    digit_images = _normalised(*MNISTDataModule.read(str(root), train=False))
    return {"ood_auroc": other(root)[1].x, "digits_auroc": digit_images.x[:HELD_OUT]}


def _clothes(root: Path) -> tuple[Images, Images]:
    pool = _normalised(*FashionMNISTDataModule.read(str(root), train=True))
    test = _normalised(*FashionMNISTDataModule.read(str(root), train=False))
    return pool, Images(test.x[:HELD_OUT], test.y[:HELD_OUT])


def _letters(root: Path) -> tuple[Images, Images]:
    images, labels = (_read_idx(root / "notMNIST" / name) for name in _LETTERS)
    everything = _normalised(images.unsqueeze(1), labels)
    pool, test = split_indices(len(labels), val_size=min(HELD_OUT, len(labels) // 2))
    return everything.at(pool), everything.at(test)


TARGETS: Final[dict[str, Callable[[Path], tuple[Images, Images]]]] = {"FashionMNIST": _clothes, "notMNIST": _letters}


def _read_idx(path: Path) -> Tensor:
    packed = path.with_name(f"{path.name}.gz")
    if not packed.exists() and not path.exists():
        raise DatasetError(
            f"notMNIST is not below {path.parent.absolute()}: {packed.name} and {path.name} are missing. Download the "
            "files of https://github.com/davidflanagan/notMNIST-to-MNIST, or pass --targets FashionMNIST."
        )
    content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    dimensions = (
        content[3] if len(content) > 3 else 0
    )  # two zeros, 8 for bytes, the number of dimensions, then the sizes
    start = 4 + 4 * dimensions
    sizes = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else ()
    if content[:3] != b"\0\0\x08" or len(content) != start + int(np.prod(sizes)):
        raise DataError(f"{path} is not a complete IDX file of bytes. Download it again.")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(sizes).copy())


def _normalised(images: Tensor, labels: Tensor) -> Images:
    (mean,), (std,) = MNISTDataModule.mean, MNISTDataModule.std  # the normalisation of the pretraining
    return Images((images.float() / 255 - mean) / std, labels.long())
