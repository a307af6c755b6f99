"""Weights from elsewhere: read without running code, compared with the model key by key, fetched where published."""

from __future__ import annotations

from lightning_bayes.zoo.weights.fitting import head_name, load_weights
from lightning_bayes.zoo.weights.published import PublishedWeights, fetch
from lightning_bayes.zoo.weights.reading import read_weights, unwrapped

__all__ = ["PublishedWeights", "fetch", "head_name", "load_weights", "read_weights", "unwrapped"]
