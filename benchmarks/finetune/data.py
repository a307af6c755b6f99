"""CIFAR-10 and SVHN in one file: seven classes for pretraining, three others and ten digits for adaptation.

    python -m benchmarks.finetune.data --root DATA --out finetune.npz

`DATA` has torchvision's folder of CIFAR-10, and SVHN's ``test_32x32.mat``. The file has random images of both, as bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.defaults.mode_problems import Images

TARGETS: Final[dict[str, tuple[int, ...]]] = {"cifar": (3, 4, 5), "svhn": tuple(range(10))}  # cats, deer, dogs; digits
FAMILIAR: Final = tuple(label for label in range(10) if label not in TARGETS["cifar"])
VALIDATION, TEST, OOD = 300, 1200, 1200  # OOD: test images of the other target
SIZES: Final = {"cifar_train": 11_000, "cifar_test": 4_000, "svhn": 3_600}  # images in the file
_MEAN, _STD = 0.47, 0.25  # of all pixels
Arrays = Mapping[str, NDArray[np.uint8]]


def read(root: Path) -> dict[str, NDArray[np.uint8]]:
    """Random images of each set as ``[N, 32, 32, 3]``, and their labels under the name with ``_y``."""
    from scipy.io import loadmat
    from torchvision.datasets import CIFAR10

    sets = {f"cifar_{name}": CIFAR10(str(root), name == "train") for name in ("train", "test")}
    digits = loadmat(str(root / "test_32x32.mat"))
    pairs = {name: (part.data, np.array(part.targets)) for name, part in sets.items()}
    pairs["svhn"] = digits["X"].transpose(3, 0, 1, 2), digits["y"].ravel() % 10
    found = dict[str, NDArray[np.uint8]]()
    for name, (images, labels) in pairs.items():
        order = np.random.default_rng(0).permutation(len(labels))[: SIZES[name]]
        found |= {name: images[order], f"{name}_y": labels[order].astype(np.uint8)}
    return found


def pretraining(arrays: Arrays, classes: Sequence[int] = FAMILIAR) -> tuple[Tensor, Tensor]:
    """The training images of some of CIFAR-10's classes."""
    return _chosen(arrays, "cifar_train", classes)


def target(arrays: Arrays, name: str, shots: int, seed: int) -> Images:
    """Images to adapt to: a random training set of `shots` images, and fixed validation and test images."""
    if name == "cifar":
        pool, test = (_chosen(arrays, f"cifar_{part}", TARGETS[name]) for part in ("train", "test"))
        ood = _chosen(arrays, "svhn", TARGETS["svhn"])[0]
    else:
        images, labels = _chosen(arrays, "svhn", TARGETS[name])
        pool, test = (images[TEST:], labels[TEST:]), (images[:TEST], labels[:TEST])
        ood = _chosen(arrays, "cifar_test", TARGETS["cifar"])[0]
    (val_x, val_y), (x, y) = ((part[:VALIDATION] for part in pool), (part[VALIDATION:] for part in pool))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:shots]
    return Images(x[order], y[order], val_x, val_y, test[0][:TEST], test[1][:TEST], ood[:OOD])


def _chosen(arrays: Arrays, name: str, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Standardised images ``[N, 3, 32, 32]`` of some classes, numbered from 0."""
    labels = arrays[f"{name}_y"]
    rows = np.isin(labels, classes)
    x = torch.tensor(arrays[name][rows]).permute(0, 3, 1, 2).contiguous()
    y = torch.tensor(np.searchsorted(np.array(classes), labels[rows]))
    return (x / 255 - _MEAN) / _STD, y


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    np.savez(options.out, allow_pickle=False, **read(options.root))


if __name__ == "__main__":
    main()
