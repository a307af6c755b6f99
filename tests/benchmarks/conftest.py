"""A data set of a few rows in place of the UCI sets."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def root(tmp_path):
    """130 random rows as the set "yacht"."""
    generator = np.random.default_rng(0)
    data = generator.normal(size=(130, 4))
    rows = {"train_0": np.arange(120), "test_0": np.arange(120, 130)}
    np.savez(tmp_path / "yacht.npz", data=data, index_features=[0, 1, 2], index_target=3, n_splits=1, **rows)
    return tmp_path
