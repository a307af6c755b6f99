"""ĥ = mean_i g_i², the diagonal of the empirical Fisher: the mean of squared per-example gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.passes import Curvature, FinishedPass


@final
class SquaredGradients(CurvatureEstimator):
    """Reads the squares that the curvature engine has summed."""

    quantity = "squared_gradients"

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        return finished.squares()
