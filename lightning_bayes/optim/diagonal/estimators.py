"""Curvature estimators: how ĥ is read from the passes of an update.

    SquaredGradients     ĥ = mean_i g_i²                 the empirical Fisher's diagonal, through the curvature engine
    BatchSquare          ĥ = ĝ²                          of the whole batch under one weight sample: the gradient magnitude
    Reparameterised      ĥ = ĝ (θ - μ) / Σ               unbiased for E_q[diag ∇²f] (Price's theorem); may be negative
    SecondOrder          ĥ = mean_i diag ∇²ℓ_i           exact, through BackPACK; may be negative
                         ĥ = mean_i diag J_iᵀ H_i J_i    exact or from sampled labels, through BackPACK

A new estimator is a subclass of `CurvatureEstimator`, which a method names as its `estimator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature import Quantity
from lightning_bayes.curvature.measurement import SecondOrderDiagonal
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass

EngineQuantity: TypeAlias = Quantity | Literal["gradient"]
Scores: TypeAlias = Callable[[Iterable[nn.Parameter]], dict[nn.Parameter, Tensor]]


class CurvatureEstimator(ABC):
    """Reads ĥ from passes, without state between them.

    `read` returns tensors under keys of its choice. These are averaged over passes, weighted by the number of examples, and
    `finalise` turns the averages into ĥ by parameter unless they are ĥ already.
    """

    quantity: ClassVar[EngineQuantity] = "gradient"  # what the curvature engine measures; "gradient" if that is enough
    allows_loss_scale: ClassVar[bool] = True  # whether it works under a scaled loss, such as a GradScaler's
    is_linear: ClassVar[bool] = True  # whether ĥ is a mean over passes; else `join_ranks` and `finalise` combine them
    degree: ClassVar[int] = 1  # ĥ is proportional to this power of the loss
    reads_count: ClassVar[bool] = False  # whether ĥ of weights without noise depends on the number of examples

    def require_scalable_loss(self, optimizer: str) -> None:
        """Raise `UnsupportedTrainingError` if the loss must not be scaled."""
        if not self.allows_loss_scale:
            raise UnsupportedTrainingError(
                f"{optimizer} measures {self.quantity} through BackPACK, which supports no scaled loss, such as that of a "
                "torch.amp.GradScaler or of precision='16-mixed'. Train with precision='32-true'."
            )

    @abstractmethod
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Tensors of one pass, by parameter or other keys; `scores` computes (θ - μ) / Σ of sampled parameters."""

    def degree_of(self, key: Any) -> int:
        """The power of the loss to which what `read` returns under a key is proportional."""
        return self.degree

    def join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        """Sum in place, over processes that share weight samples, what `finalise` does not average."""
        return

    def finalise(self, curvature: Curvature, groups: Sequence[Mapping[str, Any]], num_examples: float) -> Curvature:
        """ĥ by parameter, from the averages over the passes of an update."""
        return curvature


@final
class SquaredGradients(CurvatureEstimator):
    """Reads the squares that the curvature engine has summed."""

    quantity = "squared_gradients"
    degree = 2

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        squares: Curvature = finished.captured.mean_curvature()
        if finished.loss_scale != 1 and squares and not finished.captured.has_taken_examples:
            torch._foreach_div_(list(squares.values()), finished.loss_scale**2)
        return squares


@final
class SecondOrder(CurvatureEstimator):
    """ĥ = mean_i of a second-order diagonal: ``"diag_hessian"``, ``"diag_ggn"``, or ``"diag_ggn_mc"`` for sampled labels."""

    allows_loss_scale = False  # BackPACK's second-order extensions assume the loss itself

    def __init__(self, quantity: SecondOrderDiagonal) -> None:
        self.quantity = quantity  # type: ignore[misc]

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        return dict(finished.captured.mean_curvature())
