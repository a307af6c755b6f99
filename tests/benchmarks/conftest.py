"""Networks of a few parameters and a set of a few rows in the place of the benchmarks'."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from benchmarks.speed.models import MODELS, Case
from benchmarks.speed.setting import Setting


def build_tiny():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 3, 5))


def build_tiny_with_batch_norm():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))


@pytest.fixture
def setting():
    return Setting()


@pytest.fixture
def tiny():
    return Case("Tiny", build_tiny, image_size=8, num_classes=5, batches=(4,))


@pytest.fixture
def tiny_with_batch_norm():
    return Case("Tiny-BN", build_tiny_with_batch_norm, image_size=8, num_classes=5, batches=(4,))


@pytest.fixture
def _tiny_models(monkeypatch, tiny, tiny_with_batch_norm):
    """The benchmark knows the tiny networks and no other."""
    for name in list(MODELS):
        monkeypatch.delitem(MODELS, name)
    monkeypatch.setitem(MODELS, "tiny", tiny)
    monkeypatch.setitem(MODELS, "tiny-bn", tiny_with_batch_norm)


@pytest.fixture
def root(tmp_path):
    """130 random rows as the set "yacht"."""
    generator = np.random.default_rng(0)
    data = generator.normal(size=(130, 4))
    rows = {"train_0": np.arange(120), "test_0": np.arange(120, 130)}
    np.savez(tmp_path / "yacht.npz", data=data, index_features=[0, 1, 2], index_target=3, n_splits=1, **rows)
    return tmp_path
