"""The fused engine: the parameter gradient and the per-example squares from one computation.

Inside a capture every measured module runs on **detached** parameters, so autograd does not compute their gradient. An
identity `autograd.Function` on the module's output passes the output gradient to the module's rule. The rule computes every
example's contribution c_i to the parameter gradient. The identity returns Σ_i c_i to autograd as the parameter gradient and
stores Σ_i c_i².

If several calls of one pass use a parameter (a shared module, tied weights, a recomputed checkpoint), the contributions of
an example must be summed over the calls *before* they are squared. The capture stores them until the pass ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.example_loop import ExampleLoop
from lightning_bayes.curvature.layouts import SHARED, LayerOutput, retained_grads_kept
from lightning_bayes.curvature.parameter_uses import count_uses
from lightning_bayes.curvature.per_example_loss import reduced_losses
from lightning_bayes.curvature.wrapping import WrappingCapture, WrappingEngine


@final
class FusedEngine(WrappingEngine):
    """Measures per-example squared gradients; the default engine. Arguments as in `AbstractEngine`."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context; see `AbstractEngine.capture`."""
        return self.run(FusedCapture(self))


@final
class FusedCapture(WrappingCapture):
    """Per-example squared gradients of one pass."""

    def handle_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput]) -> None:
        """Loop over the examples if some outputs are shared by all examples or parameters are used outside of layers."""
        shared = [output for output in outputs if output.layout == SHARED]
        outside = [param for param in self.engine.trained().values() if self.uses[param]] if self.uses else []
        if shared or outside:
            ExampleLoop(self).run(loss, shared, outside)

    def measure_losses(self, losses: Tensor) -> None:
        """Measure per-example losses; see `Capture.measure_losses`."""
        loss = reduced_losses(losses, self.scale.reduction)
        reached = self._find_examples(loss, num_losses=len(losses))
        self.uses.update(count_uses(loss))
        self.handle_layouts(loss, reached)
        with retained_grads_kept(reached):
            self.measuring_backward(loss, self.engine.trained().values())
        self.has_taken_examples = True
