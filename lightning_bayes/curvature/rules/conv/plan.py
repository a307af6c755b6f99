"""The strategy for the sums of a convolution, by its sizes and device. Measured on two cores with AVX-512."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv import blocks, examples, pairs, patches
from lightning_bayes.curvature.rules.conv.shape import ConvShape

WeightSums: TypeAlias = Callable[..., tuple[Tensor, Tensor]]  # (layer, x, grad_output, workspace) → both sums


class Strategy(NamedTuple):
    """A way to Σ_i c_i(W) and Σ_i c_i(W)².

    Attributes:
        name: Its name.
        suits: Whether it is the fastest for a shape, if none before it is.
        sums: Computes both.
    """

    name: str
    suits: Callable[[ConvShape, torch.device], bool]
    sums: WeightSums


STRATEGIES = (
    Strategy("pairs", pairs.suits, pairs.sums),
    Strategy("examples", examples.suits, examples.sums),
    Strategy("blocks", blocks.suits, blocks.sums),
    Strategy("patches", patches.suits, patches.sums),
)


def plan(shape: ConvShape, device: torch.device, without: Collection[str] = ()) -> Strategy:
    """The strategy for a convolution.

    Args:
        shape: Its sizes.
        device: Where it is computed.
        without: Names of strategies to leave out, for measurements; all but ``"patches"``.

    Returns:
        The first strategy that suits.
    """
    return next(each for each in STRATEGIES if each.name not in without and each.suits(shape, device))
