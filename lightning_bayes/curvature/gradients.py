"""The engine for methods that need no per-example information. At most, it counts the examples.

The curvature of these methods comes from the batch gradient, so every layer is supported and a pass costs as much as plain
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.model_call import Uncopied
from lightning_bayes.curvature.rules.packed import is_packed
from lightning_bayes.errors import NoMeasurementError
from lightning_bayes.private_torch import tree_leaves


class GradientEngine(AbstractEngine):
    """Runs passes unchanged and counts their examples. Arguments as in `AbstractEngine`."""

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Count the examples of the passes inside the context; the capture has no curvature."""
        captured = GradientCapture(self.loss_reduction)
        with examples_counted(self.model, captured):
            yield captured

    @contextmanager
    def bare(self) -> Iterator[Capture]:
        """Neither count examples nor read the loss, for an update with a single batch whose loss is a mean."""
        yield BareCapture(self.loss_reduction)

    def check_reached(self, captured: Capture) -> None:
        """Require a call of the model unless the pass counts nothing; see `require_call`."""
        if not isinstance(captured, BareCapture):
            require_call(captured)


@contextmanager
def examples_counted(model: nn.Module, captured: Capture) -> Iterator[None]:
    """Record in `captured` the number of examples of the first module called with a tensor or packed sequence."""
    with ExitStack() as undo:
        undo.callback(captured.drop_nodes)
        undo.enter_context(captured.recorder)
        for name, module in model.named_modules():
            label = f"{name or 'the model itself'} ({type(module).__name__})"
            hook = module.register_forward_pre_hook(Uncopied(_note_first, captured, label), with_kwargs=True)
            undo.callback(hook.remove)
        yield


def _note_first(captured: Capture, label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    if captured.sizes or not torch.is_grad_enabled():
        return
    packed = next((value for value in (*args, *kwargs.values()) if is_packed([value])), None)
    if packed is not None:
        captured.note_call(label, int(packed.batch_sizes[0]))
        return
    batched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    if batched:
        captured.note_call(label, len(batched[0]))


def require_call(captured: Capture) -> None:
    """Raise `NoMeasurementError` unless a module was called with gradients enabled during a finished capture."""
    if not captured.sizes:
        raise NoMeasurementError(
            "No module of the model was called with gradients enabled, so there is nothing to measure. Run forward and "
            "backward inside the pass, on the model the optimizer was built for."
        )
    captured.require_loss()


@final
class GradientCapture(Capture):
    """Records the number of examples and how the loss reduces them."""

    def measure_losses(self, losses: Tensor) -> None:
        """Measure nothing; see `Capture.measure_losses`."""


@final
class BareCapture(Capture):
    """Counts no examples and does not read the loss: every pass has weight 1, and its gradient is a mean gradient."""

    def measure_losses(self, losses: Tensor) -> None:
        """Measure nothing; see `Capture.measure_losses`."""

    def observe(self, loss: Tensor, divided_by_host: bool = False) -> None:
        """Store the loss; see `Capture.observe`."""
        self.loss = loss.detach().clone()

    @property
    def num_examples(self) -> int:
        """The weight of a pass, 1."""
        return 1
