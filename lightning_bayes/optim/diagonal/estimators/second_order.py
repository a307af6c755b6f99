"""Second-order diagonals through BackPACK: of the Hessian or of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass


@final
class SecondOrder(CurvatureEstimator):
    """ĥ = mean_i of a second-order diagonal.

    Args:
        quantity: ``"diag_hessian"``, ``"diag_ggn"``, or ``"diag_ggn_mc"`` for sampled labels.
    """

    allows_loss_scale = False  # BackPACK's second-order extensions assume the loss itself

    def __init__(self, quantity: SecondOrderDiagonal) -> None:
        self.quantity = quantity  # type: ignore[misc]

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        return dict(finished.captured.mean_curvature())
