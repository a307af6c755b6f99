"""Tiny image data sets, and a trainer without output."""

from __future__ import annotations

import os

import pytest
import tiny_training
from fake_images import write_cifar10, write_cifar100, write_idx_sets, write_image_folder, write_svhn
from lightning_utilities.core import rank_zero
from torchvision.datasets import CIFAR10, CIFAR100, SVHN


@pytest.fixture
def quiet_trainer():
    return tiny_training.quiet_trainer


@pytest.fixture
def said(caplog):
    """Captured messages of this package; Lightning's loggers do not always propagate them to pytest's handler."""
    handler, level = caplog.handler, rank_zero.log.level
    rank_zero.log.addHandler(handler)
    rank_zero.log.setLevel("INFO")
    yield caplog
    rank_zero.log.removeHandler(handler)
    rank_zero.log.setLevel(level)


@pytest.fixture
def idx_root(tmp_path):
    """A folder with MNIST, FashionMNIST and KMNIST; see `write_idx_sets`."""
    write_idx_sets(tmp_path)
    return tmp_path


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """A folder with CIFAR-10; see `write_cifar10`."""
    for name, value in write_cifar10(tmp_path).items():
        monkeypatch.setattr(CIFAR10, name, value)
    return tmp_path


@pytest.fixture
def cifar100_root(tmp_path, monkeypatch):
    """A folder with CIFAR-100; see `write_cifar100`."""
    for name, value in write_cifar100(tmp_path).items():
        monkeypatch.setattr(CIFAR100, name, value)
    return tmp_path


@pytest.fixture
def svhn_root(tmp_path, monkeypatch):
    """A folder with SVHN; see `write_svhn`."""
    for name, value in write_svhn(tmp_path).items():
        monkeypatch.setattr(SVHN, name, value)
    return tmp_path


@pytest.fixture
def picture_root(tmp_path):
    """Class folders of PNG files; see `write_image_folder`."""
    write_image_folder(tmp_path / "pictures")
    return tmp_path / "pictures"


@pytest.fixture
def real_root():
    if "LIGHTNING_BAYES_DATA" not in os.environ:
        pytest.skip("LIGHTNING_BAYES_DATA does not name a folder with the real torchvision sets")
    return os.environ["LIGHTNING_BAYES_DATA"]
