"""Engines with hooks on the measured modules, and the fused engine: squares by this package's rules, for any layer."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.example_loop import ExampleLoop
from lightning_bayes.curvature.forward_state import compiled_modules_eager
from lightning_bayes.curvature.hooks import HookedCapture
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import refuse_scripted
from lightning_bayes.curvature.parameters import changes_refused
from lightning_bayes.curvature.workspace import DEFAULT_MIB


class HookedEngine(AbstractEngine, ABC):
    """Watches the calls of measured modules during a capture. Arguments as in `AbstractEngine`."""

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        super().__init__(model, loss_reduction, workspace_mib)
        refuse_scripted(model)

    @contextmanager
    def run(self, captured: HookedCapture) -> Iterator[Any]:
        """Measure the passes inside the context with an empty capture; its squares are complete on exit."""
        units = self.units()
        with ExitStack() as undo:
            undo.enter_context(compiled_modules_eager())
            for unit in units:
                captured.watch(unit, undo)
            undo.enter_context(changes_refused(units))
            undo.enter_context(self.watching_model_call(captured, units))
            yield captured
            captured.finish()
            captured.finish_check()


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
