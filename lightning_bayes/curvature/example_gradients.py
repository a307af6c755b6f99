"""Every example's gradient of a function of the outputs, parameter by parameter, by the layer rules.

    c_i = J_iᵀ v_i,  J_i = ∂f_i/∂θ        one backward for each column v of output gradients

A parameter's contributions ``[B, *shape]`` are handed out as soon as backward has passed its layer, so that those of one
parameter are in memory and not those of the whole model; unless several calls of a pass share the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.fused import FusedCapture, FusedEngine

Receive: TypeAlias = Callable[[nn.Parameter, Tensor], None]  # a parameter and c_i of every example


@final
class ExampleCapture(FusedCapture):
    """Hands out contributions; made by `watched_examples`.

    Args:
        engine: The engine whose model runs.
        receive: Called with a parameter and its contributions, at most once for each column.
    """

    def __init__(self, engine: FusedEngine, receive: Receive) -> None:
        super().__init__(engine)
        self.loss_reduction = "sum"
        self.receive = receive
        self._is_running = False

    @property
    def reached(self) -> set[nn.Parameter]:
        """The parameters of the layers that were called."""
        return set(self.calls)

    def takes_sums(self, params: Iterable[nn.Parameter]) -> bool:
        """Never: every example's contribution is wanted."""
        return False

    def is_asked(self, accumulators: list[Any]) -> bool:
        """Whether a column's backward runs."""
        return self._is_running

    def add_shared(self, param: nn.Parameter, contribution: Tensor) -> None:
        """Hand out the contribution, or keep it for the other calls of the parameter."""
        if self.calls[param] == 1:
            self.receive(param, contribution)
        else:
            super().add_shared(param, contribution)

    def finish(self) -> None:
        """Hand out what several calls shared."""
        for param, contribution in self.shared.items():
            self.receive(param, contribution)
        self.shared.clear()

    def backward(self, outputs: Tensor, column: Tensor) -> None:
        """Run one backward; contributions go to `receive`.

        Args:
            outputs: The model's outputs, with their graph.
            column: Gradient of every example's own function with respect to its outputs, shaped like them.
        """
        self._is_running = True
        try:
            torch.autograd.grad(outputs, list(self.calls), column, retain_graph=True, allow_unused=True)
            self.finish()
        finally:
            self._is_running = False


@contextmanager
def watched_examples(engine: FusedEngine, receive: Receive) -> Iterator[ExampleCapture]:
    """Watch the forward inside the context; `ExampleCapture.backward` then hands out contributions.

    Args:
        engine: Of the model, all of whose trainable parameters are measured.
        receive: See `ExampleCapture`.

    Yields:
        The capture.
    """
    with engine.run(ExampleCapture(engine, receive)) as captured, torch.enable_grad():
        assert isinstance(captured, ExampleCapture)
        yield captured
