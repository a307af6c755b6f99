"""Selection of the strategy for the squares of a convolution, tuned on two cores with AVX-512."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv import blocks, pairs, patches
from lightning_bayes.curvature.rules.conv.shape import ConvShape

# Σ_i c_i(W)², shaped like the weight, from (layer, x [B, Cin, *in], grad_output [B, Cout, *out], workspace).
WeightSquares: TypeAlias = Callable[..., Tensor]


class Strategy(NamedTuple):
    """One way to compute Σ_i c_i(W)²."""

    name: str
    suits: Callable[[ConvShape, torch.device], bool]
    squares: WeightSquares


STRATEGIES = (
    Strategy("pairs", pairs.suits, pairs.squares),
    Strategy("blocks", blocks.suits, blocks.squares),
    Strategy("patches", patches.suits, patches.squares),
)


@lru_cache(maxsize=256)
def plan(shape: ConvShape, device: torch.device) -> Strategy:
    """The first strategy that suits a convolution; ``"patches"`` suits all."""
    return next(strategy for strategy in STRATEGIES if strategy.suits(shape, device))
