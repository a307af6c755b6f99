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

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.TransformerEncoderLayer,  # its fast path in evaluation mode skips the dropout inside
)
_WITH_DROPOUT_ARGUMENT = (nn.MultiheadAttention, nn.RNNBase)


def dropout_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers in which dropout is the only difference between training and evaluation mode.

    Args:
        model: The model.

    Returns:
        Dropout layers, and attention and recurrent layers with internal dropout. Modules that call
        `torch.nn.functional.dropout` in ``forward`` are not detected.

    Example:
        >>> dropout_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
        [Dropout(p=0.1, inplace=False)]
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _DROPOUTS) or (isinstance(module, _WITH_DROPOUT_ARGUMENT) and module.dropout > 0)
    ]


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
