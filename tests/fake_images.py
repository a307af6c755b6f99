"""Tiny sets in torchvision's own file formats."""

from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import CIFAR10, CIFAR100

NUM_TRAIN = 20
NUM_TEST = 10


def write_idx_sets(root: Path) -> None:
    """MNIST, FashionMNIST and KMNIST of 28 × 28: image i of training is filled with i, image j of test with 100 + j."""
    for name in ("MNIST", "FashionMNIST", "KMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for split, first, count in (("train", 0, NUM_TRAIN), ("t10k", 100, NUM_TEST)):
            ids = np.arange(first, first + count, dtype=np.uint8)
            write_idx(raw / f"{split}-images-idx3-ubyte", np.broadcast_to(ids[:, None, None], (count, 28, 28)))
            write_idx(raw / f"{split}-labels-idx1-ubyte", ids % 10)


def write_idx(path: Path, array: np.ndarray) -> None:
    """One array of bytes in MNIST's own format."""
    # Magic number: two zero bytes, 8 for unsigned byte, the number of dimensions; then the sizes, big-endian.
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + np.ascontiguousarray(array).tobytes())


def write_cifar10(root: Path) -> dict[str, Any]:
    """CIFAR-10 with 4 images per training batch; image i is filled with (i, i + 50, i + 100), top left pixel 255.

    Returns what torchvision's class must be told, so that its check of the files stays on with their checksums.
    """
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)]
    return {
        "train_list": [_write_cifar_batch(folder / name, 4 * i, 4) for i, name in enumerate(names)],
        "test_list": [_write_cifar_batch(folder / "test_batch", 100, NUM_TEST)],
        "meta": {
            **CIFAR10.meta,
            "md5": _write_pickle(folder / "batches.meta", {"label_names": [str(i) for i in range(10)]}),
        },
    }


def write_cifar100(root: Path) -> dict[str, Any]:
    """CIFAR-100, filled like CIFAR-10; the class of an image is its number times 7 modulo 100."""
    folder = root / "cifar-100-python"
    folder.mkdir()
    return {
        "train_list": [_write_cifar_batch(folder / "train", 0, NUM_TRAIN, "fine_labels")],
        "test_list": [_write_cifar_batch(folder / "test", 100, NUM_TEST, "fine_labels")],
        "meta": {
            **CIFAR100.meta,
            "md5": _write_pickle(folder / "meta", {"fine_label_names": [str(i) for i in range(100)]}),
        },
    }


def write_svhn(root: Path) -> dict[str, Any]:
    """SVHN of 32 × 32: image i is filled with (i, i + 50, i + 100) and shows the digit i modulo 10, 0 stored as 10.

    Returns what torchvision's class must be told, as `write_cifar10` does.
    """
    files = {"train": (0, NUM_TRAIN), "test": (100, NUM_TEST)}
    return {"split_list": {split: _write_mat(root / f"{split}_32x32.mat", *ids) for split, ids in files.items()}}


def _write_mat(path: Path, first: int, count: int) -> list[str]:
    ids = np.arange(first, first + count, dtype=np.uint8)
    images = np.broadcast_to(np.stack([ids, ids + 50, ids + 100])[None, None], (32, 32, 3, count))
    savemat(path, {"X": images, "y": np.where(ids % 10 == 0, 10, ids % 10)[:, None]})
    return ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]


def write_image_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10) -> None:
    """Folders of PNG files, 40 × 30 in colour: the red of image j of class i is 50 i + j, its upper left corner white."""
    for i, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for j in range(count):
            pixels = np.zeros((30, 40, 3), dtype=np.uint8)
            pixels[..., 0] = 50 * i + j
            pixels[0, 0] = 255
            Image.fromarray(pixels).save(root / name / f"{j}.png")


def _write_cifar_batch(path: Path, first: int, count: int, key: str = "labels") -> list[str]:
    ids = np.arange(first, first + count, dtype=np.uint8)
    data = np.repeat(np.stack([ids, ids + 50, ids + 100], axis=1)[:, :, None], 1024, axis=2)
    data[:, :, 0] = 255
    labels = ids.astype(int) % 10 if key == "labels" else ids.astype(int) * 7 % 100
    return [path.name, _write_pickle(path, {"data": data.reshape(count, 3072), key: labels.tolist()})]


def _write_pickle(path: Path, content: dict) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()
