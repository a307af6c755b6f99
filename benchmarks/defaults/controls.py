"""Controls that lack the cause: noise without a curvature, and a curvature whose places are shuffled.

`FlatNoise` measures nothing, so that all of a tensor's weights have the noise κr. `Permuted` is VOGN with each tensor's
squared gradients permuted, always in the same way: the noise keeps its distribution and loses its places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes import VariationalCallback
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.diagonal.estimators import SquaredGradients
from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.diagonal.vogn import update
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass


@final
class NoCurvature(CurvatureEstimator):
    """ĥ = 0."""

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read nothing; see `CurvatureEstimator`."""
        return {param: torch.zeros_like(param) for param in params}


@final
class PermutedSquares(CurvatureEstimator):
    """ĥ = mean_i g_i² at the places of other weights of the same tensor."""

    quantity = "squared_gradients"

    def __init__(self) -> None:
        self._squares = SquaredGradients()

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read the squares and permute them; see `CurvatureEstimator`."""
        found = self._squares.read(finished, params, scores)
        return {key: value.flatten()[permutation(value.numel())].view_as(value) for key, value in found.items()}


def permutation(size: int) -> Tensor:
    """One permutation of `size` elements, the same at each call."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


@final
class FlatNoise(MeanFieldOptimizer):
    """The user's step under noise of the same size in all of a tensor's weights."""

    noisy = averages_curvature = True
    estimator = NoCurvature()
    natural_update = staticmethod(update)


@final
class Permuted(MeanFieldOptimizer):
    """VOGN with a curvature at the wrong places."""

    noisy = averages_curvature = True
    estimator = PermutedSquares()
    natural_update = staticmethod(update)


@final
class FlatNoiseCallback(VariationalCallback):
    """The default without a curvature."""

    optimizer_class = FlatNoise


@final
class PermutedCallback(VariationalCallback):
    """The default with a curvature at the wrong places."""

    optimizer_class = Permuted
