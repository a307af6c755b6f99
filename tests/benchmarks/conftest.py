"""A network of a few parameters in the place of the benchmark's."""

from __future__ import annotations

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
