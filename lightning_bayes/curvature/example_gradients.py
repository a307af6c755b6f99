"""Per-example gradients of a function of the outputs, parameter by parameter, computed by the layer rules.

    c_i = J_iᵀ v_i,  J_i = ∂f_i/∂θ        one backward for each column v of output gradients

A callback receives the contributions ``[B, *shape]`` of a parameter as soon as backward has passed its layer, so memory
holds the contributions of one parameter at a time. Exception: contributions of parameters with several calls in a pass are
stored until the backward ends. A linear layer or convolution with fewer positions than outputs passes the rows whose
products add up to its contributions, because rotating them takes less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors import LayerRows, has_factors, layer_rows
from lightning_bayes.curvature.fused import HookedEngine
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.layer_calls import LayerCall
from lightning_bayes.curvature.layouts import ROWS
from lightning_bayes.curvature.loss import refuse_losses

Contribution: TypeAlias = Tensor | LayerRows
Receive: TypeAlias = Callable[[nn.Parameter, Contribution], None]  # called with a parameter and c_i of all examples


def dense(param: nn.Parameter, contribution: Contribution) -> Tensor:
    """c_i, ``[B, *shape]``."""
    return (
        contribution.example_gradients().view(-1, *param.shape) if isinstance(contribution, LayerRows) else contribution
    )


@final
class ExampleCapture(HookedCapture):
    """Passes contributions to a callback; created by `watched_examples`."""

    measure_losses = refuse_losses

    def __init__(self, engine: HookedEngine, receive: Receive) -> None:
        super().__init__(engine)
        self.receive = receive

    needs_examples = True

    def handle_call(self, call: LayerCall, inputs: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Pass on the rows of a layer with factors whose parameters have no other call."""
        layer, delta = call.unit.module, grads[0]
        if call.output.layout != ROWS or not has_factors(layer) or getattr(layer, "groups", 1) != 1:
            return False
        if delta is None or any(self.calls[param] != 1 for param in call.params.values()):
            return False
        if delta.numel() >= len(delta) * layer.get_parameter("weight").shape[0] ** 2:  # as many positions as outputs
            return False
        rows = layer_rows(layer, inputs[0], delta, bias=False)
        for name, param in call.params.items():
            self.receive(param, rows if name == "weight" else rows.gradients.sum(1))
        return True

    def add_complete(self, param: nn.Parameter, contributions: Tensor) -> None:
        """Pass on the contributions."""
        if self.sums is None:
            self.receive(param, contributions)
        else:
            super().add_complete(param, contributions)

    def backward(self, outputs: Tensor, column: Tensor) -> None:
        """Run one backward from a column of output gradients, which passes contributions to `receive`."""
        self.measuring_backward(outputs, self.calls, column)


@contextmanager
def watched_examples(engine: HookedEngine, receive: Receive) -> Iterator[ExampleCapture]:
    """Record the forward inside the context; `ExampleCapture.backward` then passes contributions to `receive`."""
    with engine.run(ExampleCapture(engine, receive)) as captured, torch.enable_grad():
        assert isinstance(captured, ExampleCapture)
        yield captured
