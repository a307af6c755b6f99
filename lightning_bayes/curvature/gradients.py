"""The engine of methods that need no per-example information. It only counts examples.

Their curvature comes from the batch's own gradient, so every layer is supported and a pass costs what plain training does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.engine import AbstractEngine, Capture
from lightning_bayes.errors import NoMeasurementError
from lightning_bayes.private_torch import tree_leaves


class GradientEngine(AbstractEngine):
    """Leaves passes as they are, and notes their number of examples. Arguments as in `AbstractEngine`."""

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Count the examples of the passes inside the context.

        Yields:
            The capture, without curvature.
        """
        captured = self.new_capture()
        with ExitStack() as undo:
            for name, module in self.model.named_modules():
                label = f"{name or 'the model itself'} ({type(module).__name__})"
                hook = module.register_forward_pre_hook(partial(captured.called, label), with_kwargs=True)
                undo.callback(hook.remove)
            yield captured

    def new_capture(self) -> GradientCapture:
        """An empty capture."""
        return GradientCapture(self.loss_reduction)

    def check_reached(self, captured: Capture) -> None:
        """Require a call of the model.

        Args:
            captured: A finished capture.

        Raises:
            NoMeasurementError: If no module was called with gradients on.
        """
        if not captured.sizes:
            raise NoMeasurementError(
                "No module of the model was called with gradients on, so there is nothing to measure. Run forward and "
                "backward inside the pass, on the model the optimizer was built for."
            )
        captured.require_loss()


class GradientCapture(Capture):
    """The examples are those of the first module that is called with a tensor."""

    def called(self, label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of every module; `label` is what messages call it."""
        if self.sizes or not torch.is_grad_enabled():
            return
        batched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if batched:
            self.note_call(label, len(batched[0]))
