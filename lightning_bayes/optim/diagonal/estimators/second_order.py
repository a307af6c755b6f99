"""Second-order diagonals through BackPACK: the Hessian's, or that of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass


@final
class SecondOrder(CurvatureEstimator):
    """ĥ = mean_i of a second-order diagonal.

    Args:
        quantity: ``"diag_hessian"``, ``"diag_ggn"``, or ``"diag_ggn_mc"`` for sampled labels.
    """

    def __init__(self, quantity: SecondOrderDiagonal) -> None:
        self.quantity = quantity  # type: ignore[misc]

    def prepare(self, optimizer: str, loss_scale: float) -> None:
        """Refuse a scaled loss; see `CurvatureEstimator`.

        Raises:
            UnsupportedTrainingError: If the loss is scaled.
        """
        if loss_scale != 1:
            raise UnsupportedTrainingError(
                f"{optimizer} measures {self.quantity} through BackPACK, which takes no scaled loss, such as that of a "
                "torch.amp.GradScaler or of precision='16-mixed'. Train without, in precision='32-true'."
            )

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        return dict(finished.captured.mean_curvature())
