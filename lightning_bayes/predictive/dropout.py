"""Monte-Carlo dropout: forward passes with dropout active, as samples of an approximate posterior.

Gal & Ghahramani 2016, https://arxiv.org/abs/1506.02142.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from lightning_bayes.curvature.rules.random_numbers import seeded
from lightning_bayes.predictive.samples import NetworkSamples, restored_modes, sample_seed

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_PATH_DROPOUTS = ("DropPath", "StochasticDepth")  # of timm, torchvision and others, known by their class names


def dropout_rate(layer: nn.Module) -> float | None:
    """The probability with which a layer itself drops values in training mode; None if it is no dropout layer."""
    if isinstance(layer, _DROPOUTS):
        return layer.p
    if isinstance(layer, nn.RNNBase):  # drops between its layers
        return float(layer.dropout) if layer.num_layers > 1 else 0.0
    if isinstance(layer, nn.MultiheadAttention):
        return float(layer.dropout)
    if isinstance(layer, nn.TransformerEncoderLayer):  # its fast path in evaluation mode skips the dropout inside
        return max(dropout_rate(child) or 0.0 for child in layer.children())
    if type(layer).__name__ in _PATH_DROPOUTS:
        return float(getattr(layer, "drop_prob", getattr(layer, "p", None)) or 0.0)
    return None


def dropout_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers in which dropout is the only difference between training and evaluation mode.

    Args:
        model: The model.

    Returns:
        Dropout layers, stochastic depth, and attention and recurrent layers with internal dropout, if their probability is
        above 0. Modules that call `torch.nn.functional.dropout` in ``forward`` are not detected.

    Example:
        >>> dropout_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0)))
        [Dropout(p=0.1, inplace=False)]
    """
    return [module for module in model.modules() if dropout_rate(module)]


def inactive_dropout(model: nn.Module) -> list[str]:
    """Names of the dropout layers that drop nothing."""
    return [name for name, module in model.named_modules() if dropout_rate(module) == 0]


@final
class DropoutSamples(NetworkSamples):
    """S reproducible forward passes with dropout. Every batch and pass uses different random numbers.

    Args:
        layers: Layers that apply dropout in training mode; see `dropout_layers`.
        count: S.
        seed: Seed of the passes. The state of the global random number generators is restored.
    """

    fixed = False

    def __init__(self, layers: Sequence[nn.Module], count: int, seed: int = 0) -> None:
        self.layers, self.count, self.seed = list(layers), count, seed
        self._passes = 0

    @contextmanager
    def sampled(self, model: nn.Module, index: int) -> Iterator[None]:
        """Context in which dropout is active; `index` is not used, because every pass is a new sample."""
        device = next(model.parameters(), torch.empty(0)).device
        self._passes += 1
        with restored_modes(self.layers), seeded(device, sample_seed(self.seed, self._passes)):
            for layer in self.layers:
                layer.training = True
            yield
