"""Pretrained weights: download them, read them without running code, and load them strictly."""

from __future__ import annotations

from lightning_bayes.zoo.weights.fitting import head_name, load_weights
from lightning_bayes.zoo.weights.published import PublishedWeights, fetch
from lightning_bayes.zoo.weights.reading import read_weights, unwrapped

__all__ = ["PublishedWeights", "fetch", "head_name", "load_weights", "read_weights", "unwrapped"]
