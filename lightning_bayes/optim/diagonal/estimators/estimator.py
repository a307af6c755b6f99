"""The interface of a curvature estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from lightning_bayes.curvature import Quantity
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass

EngineQuantity: TypeAlias = Quantity | Literal["gradient"]
Scores: TypeAlias = Callable[[Iterable[nn.Parameter]], dict[nn.Parameter, Tensor]]


class CurvatureEstimator(ABC):
    """Reads ĥ from passes; it keeps nothing between them.

    `read` returns tensors under keys of its choice, which are averaged over passes, weighted by their examples. `finalise`
    turns these means into ĥ by parameter; an estimate that is linear in the passes is its own mean.

    Class attributes:
        quantity: The engine's quantity for it; ``"gradient"`` for the gradient alone.
    """

    quantity: ClassVar[EngineQuantity] = "gradient"

    def prepare(self, optimizer: str, loss_scale: float) -> None:
        """Refuse a pass that it cannot measure, before the forward.

        Args:
            optimizer: Name of the optimizer, for the message.
            loss_scale: Factor on the loss.
        """
        return

    @abstractmethod
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass.

        Args:
            finished: The pass.
            params: The trained parameters.
            scores: Gives (θ - μ) / Σ of those parameters that had noise, in memory of the caller's.

        Returns:
            Tensors by parameter or other keys, which the caller may overwrite.
        """

    def join_ranks(
        self,
        curvature: Curvature,
        num_examples: float,
        params: Sequence[nn.Parameter],
        add_ranks: Callable[[list[Tensor]], None],
    ) -> None:
        """Let passes of other processes under the same weight samples add up, for estimates that are not linear in them.

        Args:
            curvature: Means over the passes, changed in place.
            num_examples: Their number of examples.
            params: The trained parameters, in an order that all processes share.
            add_ranks: Replaces tensors by their sums over those processes.
        """
        return

    def finalise(self, curvature: Curvature) -> Curvature:
        """ĥ by parameter.

        Args:
            curvature: Means over the passes of an update.

        Returns:
            ĥ of the parameters that were measured.
        """
        return curvature

    def scaled(self, measured: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """ĥ in the units that a parameter group asks for.

        Args:
            measured: ĥ of its parameters.
            group: The group.

        Returns:
            ĥ as the update takes it.
        """
        return measured

    def warning(self, batch_size: float, group: Mapping[str, Any], optimizer: str) -> str:
        """Why ĥ is not a curvature.

        Args:
            batch_size: Examples under one weight sample.
            group: A parameter group.
            optimizer: Name of the optimizer.

        Returns:
            The text of a warning; empty if nothing is wrong.
        """
        return ""
