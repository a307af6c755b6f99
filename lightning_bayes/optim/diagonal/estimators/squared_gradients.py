"""ĥ = mean_i g_i², the diagonal of the empirical Fisher: the mean of squared per-example gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass


@final
class SquaredGradients(CurvatureEstimator):
    """Reads the squares that the curvature engine has summed."""

    quantity = "squared_gradients"

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        squares: Curvature = finished.captured.mean_curvature()
        if finished.loss_scale != 1 and squares and not finished.captured.has_taken_examples:
            torch._foreach_div_(list(squares.values()), finished.loss_scale**2)
        return squares
