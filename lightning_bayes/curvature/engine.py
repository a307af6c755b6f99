"""Engines open a capture around forward and backward passes and validate the result; the engine without curvature.

Methods without per-example curvature use `GradientEngine`. It supports every layer, and a pass costs as much as plain
training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.curvature.parameters import require_real_and_separate
from lightning_bayes.curvature.plan import Plans
from lightning_bayes.curvature.rules.packed import is_packed
from lightning_bayes.curvature.rules.replayed_call import Checked
from lightning_bayes.curvature.tape import Tape
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.likelihood.module_outputs import Uncopied
from lightning_bayes.private_torch import tree_leaves

EngineName: TypeAlias = Literal["fused", "backpack"]


class AbstractEngine(ABC):
    """Measures the curvature of a model during its forward and backward passes.

    Args:
        model: The model. Parameters are matched by identity, so the model may be wrapped later.
        loss_reduction: How losses reduce their examples.
        workspace_mib: Memory limit in MiB for per-example values.
    """

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        self.model = model
        self.loss_reduction = loss_reduction
        self.workspace = Workspace(workspace_mib)
        self.plans = Plans(model, self.find_units)
        self.has_warned_of_loop = False
        self.checked: Checked = set()  # calls of modules without a rule that passed their check
        require_real_and_separate(model)

    @staticmethod
    def find_units(model: nn.Module, **options: Any) -> list[MeasuredModule]:
        """The modules whose calls are measured, each with its rule; options as in `find_measured_modules`."""
        return find_measured_modules(model, **options)

    @abstractmethod
    def capture(self, *, left_out: Collection[nn.Parameter] = ()) -> AbstractContextManager[Capture]:
        """Measure the forward and backward passes inside the context; restore the model on exit.

        Args:
            left_out: Trainable parameters whose curvature is not measured.
        """


@final
class GradientCapture(Capture):
    """Records the number of examples and how the loss reduces them."""

    def measure_losses(self, losses: Tensor) -> None:
        """Measure nothing."""


class GradientEngine(AbstractEngine):
    """Runs passes unchanged and counts their examples.

    Args:
        model: The model; see `AbstractEngine`.
        loss_reduction: How losses reduce their examples.
        new_capture: The type of its captures, which have no curvature by rules.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_reduction: LossReduction = "auto",
        new_capture: Callable[[LossReduction], Capture] = GradientCapture,
    ) -> None:
        super().__init__(model, loss_reduction)
        self.new_capture = new_capture

    @contextmanager
    def capture(self, *, left_out: Collection[nn.Parameter] = ()) -> Iterator[Capture]:
        """Count the examples of the passes inside the context."""
        captured = self.new_capture(self.loss_reduction)
        with ExitStack() as undo:
            undo.callback(captured.drop_nodes)
            captured.tape = undo.enter_context(Tape())
            for name, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                    continue
                label = f"{name or 'the model itself'} ({type(module).__name__})"
                hook = module.register_forward_pre_hook(Uncopied(_note_first, captured, label), with_kwargs=True)
                undo.callback(hook.remove)
            yield captured


def _note_first(captured: Capture, label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook: record the number of examples of the first call with a tensor or packed sequence."""
    if captured.sizes or not torch.is_grad_enabled():
        return
    packed = next((value for value in (*args, *kwargs.values()) if is_packed([value])), None)
    if packed is not None:
        captured.sizes[label] = {int(packed.batch_sizes[0])}
        return
    batched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    if batched:
        captured.sizes[label] = {len(batched[0])}
