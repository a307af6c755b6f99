"""Monte-Carlo dropout: passes with dropout on, each under random numbers of its own.

Gal & Ghahramani 2016, https://arxiv.org/abs/1506.02142: passes of a network trained with dropout are samples of an
approximate posterior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from lightning_bayes.predictive.samples import NetworkSamples, sample_seed

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.TransformerEncoderLayer,  # in evaluation it may take a fast path that skips the dropout inside
)
_WITH_DROPOUT_INSIDE = (nn.MultiheadAttention, nn.RNNBase)


def dropout_layers(model: nn.Module) -> list[nn.Module]:
    """Layers of torch whose training mode means dropout and nothing else.

    Args:
        model: The model.

    Returns:
        Its dropout layers, and its attention and recurrent layers with dropout inside. What calls
        `torch.nn.functional.dropout` in a forward of its own is not seen.

    Example:
        >>> dropout_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
        [Dropout(p=0.1, inplace=False)]
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _DROPOUTS) or (isinstance(module, _WITH_DROPOUT_INSIDE) and module.dropout > 0)
    ]


@final
class DropoutSamples(NetworkSamples):
    """S passes with dropout, reproducible, with other random numbers for every batch and pass.

    Args:
        layers: Layers whose training mode means dropout.
        count: S.
        seed: Seed; the global random number generators are left as they were.
    """

    fixed = False

    def __init__(self, layers: Sequence[nn.Module], count: int, seed: int = 0) -> None:
        self.layers, self.count, self.seed = list(layers), count, seed
        self._passes = 0

    @contextmanager
    def sampled(self, model: nn.Module, index: int) -> Iterator[None]:
        """Inside, dropout is on.

        Args:
            model: The model.
            index: Number of the sample.

        Yields:
            Nothing.
        """
        modes = [layer.training for layer in self.layers]
        device = next(model.parameters(), torch.empty(0)).device
        self._passes += 1
        try:
            for layer in self.layers:
                layer.training = True
            with _seeded(device, sample_seed(self.seed, self._passes)):
                yield
        finally:
            for layer, mode in zip(self.layers, modes, strict=True):
                layer.training = mode


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the global generators of the CPU and of `device` start from `seed`; afterwards they are as before."""
    accelerators: list[Any] = [] if device.type == "cpu" else [getattr(torch, device.type)]
    state, states = torch.get_rng_state(), [accelerator.get_rng_state() for accelerator in accelerators]
    try:
        torch.default_generator.manual_seed(seed)
        for accelerator in accelerators:
            accelerator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(state)
        for accelerator, before in zip(accelerators, states, strict=True):
            accelerator.set_rng_state(before)
