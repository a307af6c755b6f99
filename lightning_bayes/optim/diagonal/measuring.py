"""The second quantity that a mean-field method asks of its passes, collected into ĥ; see `optim.diagonal.measures`."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.diagonal.measures import FROM_GRADIENT, BatchSquares, Measure, reparameterised
from lightning_bayes.optim.readout.state import state_precision
from lightning_bayes.optim.runtime.base import NoisyOptimizer


class MeasuringOptimizer(NoisyOptimizer, ABC):
    """A noisy optimizer whose passes measure what `measures` says; arguments as in `NoisyOptimizer`.

    Class attributes:
        measures: The quantity.
    """

    measures: ClassVar[Measure] = "squared_gradients"

    def __init__(self, *args: Any, **arguments: Any) -> None:
        self._batch_squares = BatchSquares()
        super().__init__(*args, **arguments)

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        if loss_scale != 1 and self.measures.startswith("diag_"):
            raise UnsupportedTrainingError(
                f"{type(self).__name__} measures {self.measures} through BackPACK, which takes no scaled loss, such as "
                "that of a torch.amp.GradScaler or of precision='16-mixed'. Train without, in precision='32-true'."
            )
        return super()._open_capture(sample, loss_scale)

    def _curvature_of_pass(self, captured: Capture, loss_scale: float, sample: int) -> dict[nn.Parameter, Tensor]:
        if self.measures == "squared_gradients":
            return super()._curvature_of_pass(captured, loss_scale, sample)
        if self.measures not in FROM_GRADIENT:
            return captured.mean_curvature()  # second-order quantities do not see the loss's scale
        factor = captured.gradient_factor() / loss_scale
        grads = {param: param.grad * factor for _, param in self._trained() if param.grad is not None}
        if self.measures == "reparameterised":
            return {param: self._reparameterised(param, grad, captured.num_examples) for param, grad in grads.items()}
        self._batch_squares.add(sample, captured.num_examples, grads)
        return {}

    def _reparameterised(self, param: nn.Parameter, grad: Tensor, num_examples: float) -> Tensor:
        mean = self.sampled_mean().get(param)
        if mean is None:  # a pass without noise says nothing of the curvature: its magnitude, as if from one example
            return grad.square_().mul_(num_examples)
        group = next(group for group, other in self._trained() if other is param)
        precision_of_pass = state_precision(group, self.state[param], mean)
        assert precision_of_pass is not None
        return reparameterised(grad, param.detach(), mean, precision_of_pass)

    def _join_ranks(self, add_ranks: Callable[[list[Tensor]], None]) -> None:
        if self.measures == "batch_square":
            self._batch_squares.join_ranks([param for _, param in self._trained()], add_ranks)

    def _measured(self) -> list[Tensor]:
        if self.measures == "batch_square":
            self._passes.curvature.update(self._batch_squares.mean())
            self._batch_squares.clear()
        return super()._measured()

    def _forget_passes(self) -> None:
        super()._forget_passes()
        self._batch_squares.clear()
