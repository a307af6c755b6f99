"""Controls: noise without a curvature, and a curvature that is shuffled within each tensor.

`FlatNoise` measures nothing, so all weights of a tensor have the noise κr. `Permuted` is VOGN with the squared gradients of
each tensor permuted by a fixed permutation: the noise keeps its distribution but not its location.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes import VariationalCallback
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores, SquaredGradients
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.vogn import update
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass


@final
class NoCurvature(CurvatureEstimator):
    """ĥ = 0."""

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read nothing; see `CurvatureEstimator`."""
        return {param: torch.zeros_like(param) for param in params}


@final
class PermutedSquares(CurvatureEstimator):
    """ĥ = mean_i g_i², permuted within each tensor."""

    quantity = "squared_gradients"

    def __init__(self) -> None:
        self._squares = SquaredGradients()

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read the squares and permute them; see `CurvatureEstimator`."""
        squares = self._squares.read(finished, params, scores)
        return {param: h.flatten()[permutation(h.numel())].view_as(h) for param, h in squares.items()}


def permutation(size: int) -> Tensor:
    """A fixed permutation of `size` elements."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


@final
class FlatNoise(VariationalOptimizer):
    """The user's step under noise with the same scale for all weights of a tensor."""

    noisy = averages_curvature = True
    family_type = DiagonalFamily
    estimator = NoCurvature()
    natural_update = staticmethod(update)


@final
class Permuted(VariationalOptimizer):
    """VOGN with a permuted curvature."""

    noisy = averages_curvature = True
    family_type = DiagonalFamily
    estimator = PermutedSquares()
    natural_update = staticmethod(update)


@final
class FlatNoiseCallback(VariationalCallback):
    """The default without a curvature."""

    optimizer_class = FlatNoise


@final
class PermutedCallback(VariationalCallback):
    """The default with a permuted curvature."""

    optimizer_class = Permuted
