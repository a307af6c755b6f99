"""Actors and critics of many runs at once: flat weights ``[R, P]``, one batched matrix product per layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Generator, Tensor

_LAST = 3e-3  # bound of the last layers' weights, Lillicrap et al. 2016


@dataclass(frozen=True)
class Sizes:
    """Sizes of an environment and of the hidden layers of both networks."""

    observation: int
    action: int
    hidden: tuple[int, int]

    @property
    def actor(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer of the actor."""
        return list(pairwise((self.observation, *self.hidden, self.action)))

    @property
    def critic(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer of the critic; the action enters the second layer."""
        first, second = self.hidden
        return [(self.observation, first), (first + self.action, second), (second, 1)]


def initial_weights(layers: list[tuple[int, int]], generator: Generator) -> Tensor:
    """Initial weights ``[P]``: uniform within ±1/√fan-in, in the last layer within ±0.003."""
    bounds = [inputs**-0.5 for inputs, _ in layers[:-1]] + [_LAST]
    sizes = [(inputs + 1) * outputs for inputs, outputs in layers]
    parts = [(2 * torch.rand(n, generator=generator) - 1) * b for n, b in zip(sizes, bounds, strict=True)]
    return torch.cat(parts)


def _unflatten(flat: Tensor, layers: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Weights ``[R, in, out]`` and biases ``[R, 1, out]``."""
    parts = flat.split([n for inputs, outputs in layers for n in (inputs * outputs, outputs)], -1)
    weights = [part.unflatten(-1, sides) for part, sides in zip(parts[::2], layers, strict=True)]
    return list(zip(weights, (bias.unsqueeze(-2) for bias in parts[1::2]), strict=True))


def act(flat: Tensor, sizes: Sizes, observations: Tensor) -> Tensor:
    """Actions ``[R, B, action]`` in [-1, 1] of policies with weights ``[R, P]`` for observations ``[R, B, observation]``."""
    *hidden, (weight, bias) = _unflatten(flat, sizes.actor)
    x = observations
    for w, b in hidden:
        x = torch.baddbmm(b, x, w).relu()
    return torch.baddbmm(bias, x, weight).tanh()


def value(flat: Tensor, sizes: Sizes, observations: Tensor, actions: Tensor) -> Tensor:
    """Q(s, a), ``[R, B]``, of critics with weights ``[R, P]``."""
    (w1, b1), (w2, b2), (w3, b3) = _unflatten(flat, sizes.critic)
    x = torch.baddbmm(b1, observations, w1).relu()
    x = torch.baddbmm(b2, torch.cat([x, actions], -1), w2).relu()
    return torch.baddbmm(b3, x, w3)[..., 0]
