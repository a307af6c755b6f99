"""The interface of a curvature estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from lightning_bayes.curvature import Quantity
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass

EngineQuantity: TypeAlias = Quantity | Literal["gradient"]
Scores: TypeAlias = Callable[[Iterable[nn.Parameter]], dict[nn.Parameter, Tensor]]


class CurvatureEstimator(ABC):
    """Reads ĥ from passes, without state between them.

    `read` returns tensors under keys of its choice. These are averaged over passes, weighted by the number of examples, and
    `finalise` turns the averages into ĥ by parameter unless they are ĥ already.

    Class attributes:
        quantity: The quantity that the curvature engine measures for it; ``"gradient"`` if the gradient is enough.
        allows_loss_scale: Whether it works under a scaled loss, such as a GradScaler's.
        is_linear: Whether ĥ is a mean over passes. If not, `join_ranks` and `finalise` combine the passes, and the scale of
            ĥ depends on the batch size; see `BatchSizeCheck`.
        reads_count: Whether ĥ of weights without noise depends on the number of examples.
    """

    quantity: ClassVar[EngineQuantity] = "gradient"
    allows_loss_scale: ClassVar[bool] = True
    is_linear: ClassVar[bool] = True
    reads_count: ClassVar[bool] = False

    def require_scalable_loss(self, optimizer: str) -> None:
        """Raise `UnsupportedTrainingError` if the loss must not be scaled."""
        if not self.allows_loss_scale:
            raise UnsupportedTrainingError(
                f"{optimizer} measures {self.quantity} through BackPACK, which supports no scaled loss, such as that of a "
                "torch.amp.GradScaler or of precision='16-mixed'. Train with precision='32-true'."
            )

    @abstractmethod
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass.

        Args:
            finished: The pass.
            params: The trained parameters.
            scores: Computes (θ - μ) / Σ for those of its arguments that were sampled, in the engine's workspace.

        Returns:
            Tensors by parameter or other keys. The caller may overwrite them.
        """

    def join_ranks(
        self,
        curvature: Curvature,
        num_examples: float,
        params: Sequence[nn.Parameter],
        add_ranks: Callable[[list[Tensor]], None],
    ) -> None:
        """Sum over processes that share weight samples, for estimates that are not linear in the passes.

        Args:
            curvature: Averages over the passes, changed in place.
            num_examples: Number of examples in these passes.
            params: The trained parameters, in the same order in all processes.
            add_ranks: Replaces tensors by their sums over those processes.
        """
        return

    def finalise(self, curvature: Curvature, groups: Sequence[Mapping[str, Any]]) -> Curvature:
        """Compute ĥ by parameter.

        Args:
            curvature: Averages over the passes of an update.
            groups: The optimizer's parameter groups.

        Returns:
            ĥ of the parameters that were measured.
        """
        return curvature
