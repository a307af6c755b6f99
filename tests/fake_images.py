"""Tiny sets in torchvision's own file formats."""

from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets import CIFAR10

NUM_TRAIN = 20
NUM_TEST = 10


def write_idx_sets(root: Path) -> None:
    """MNIST and FashionMNIST of 28 × 28: image i of training is filled with i, image j of test with 100 + j."""
    for name in ("MNIST", "FashionMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for split, first, count in (("train", 0, NUM_TRAIN), ("t10k", 100, NUM_TEST)):
            ids = np.arange(first, first + count, dtype=np.uint8)
            _write_idx(raw / f"{split}-images-idx3-ubyte", np.broadcast_to(ids[:, None, None], (count, 28, 28)))
            _write_idx(raw / f"{split}-labels-idx1-ubyte", ids % 10)


def _write_idx(path: Path, array: np.ndarray) -> None:
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


def _write_cifar_batch(path: Path, first: int, count: int) -> list[str]:
    ids = np.arange(first, first + count, dtype=np.uint8)
    data = np.repeat(np.stack([ids, ids + 50, ids + 100], axis=1)[:, :, None], 1024, axis=2)
    data[:, :, 0] = 255
    return [path.name, _write_pickle(path, {"data": data.reshape(count, 3072), "labels": (ids % 10).tolist()})]


def _write_pickle(path: Path, content: dict) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()
