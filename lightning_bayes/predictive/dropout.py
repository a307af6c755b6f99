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
    """Layers in which dropout with p > 0 is the only difference between the modes; `F.dropout` is not found."""
    return [module for module in model.modules() if dropout_rate(module)]


def inactive_dropout(model: nn.Module) -> list[str]:
    """Names of the dropout layers that drop nothing."""
    return [name for name, module in model.named_modules() if dropout_rate(module) == 0]


@final
class DropoutSamples(NetworkSamples):
    """S reproducible passes with dropout in `layers`, with other random numbers in every batch and pass."""

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
