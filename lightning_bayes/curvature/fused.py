"""The fused engine: per-example squared gradients by this package's rules, for any layer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import final

from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.example_loop import ExampleLoop
from lightning_bayes.curvature.hooks import HookedCapture, HookedEngine


@final
class FusedEngine(HookedEngine):
    """Measures per-example squared gradients; the default engine. Arguments as in `AbstractEngine`."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context; see `AbstractEngine.capture`."""
        return self.run(FusedCapture(self))


@final
class FusedCapture(HookedCapture):
    """Per-example squared gradients of one pass."""

    def loop(self, loss: Tensor, params: set[nn.Parameter]) -> None:
        """Measure parameters by a loop over the examples; see `HookedCapture.loop`."""
        if params:
            ExampleLoop(self).run(loss, params)

    def measure_losses(self, losses: Tensor) -> None:
        """Measure per-example losses; see `Capture.measure_losses`."""
        loss = self.recorder.reduced(losses, self.scale.reduction)
        self.handle_layouts(loss, self._find_examples(loss, num_losses=len(losses)))
        with self.left_alone():
            self.measuring_backward(loss, self.engine.trained().values())
        self.has_taken_examples = True
