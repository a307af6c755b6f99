"""The base class of engines: an engine opens a capture around forward and backward passes and validates the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, TypeAlias

from torch import nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.layout_probe import LayoutProbe
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.curvature.model_call import Uncopied
from lightning_bayes.curvature.parameters import require_real_and_separate
from lightning_bayes.curvature.rules.replayed_call import Checked
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import NoMeasurementError, UnsupportedLayerError, name_some
from lightning_bayes.private_torch import has_children

EngineName: TypeAlias = Literal["fused", "backpack"]


class AbstractEngine(ABC):
    """Measures the curvature of a model during its forward and backward passes.

    Args:
        model: The model. Parameters are matched by identity, so the model may be wrapped later.
        loss_reduction: How losses reduce their examples.
        workspace_mib: Memory limit in MiB for per-example values.

    Class attributes:
    """

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        self.model = model
        self.loss_reduction = loss_reduction
        self.workspace = Workspace(workspace_mib)
        self.left_out: set[nn.Parameter] = set()  # trainable parameters that are not measured
        self.probe = LayoutProbe()
        self.has_warned_of_loop = False
        self.checked: Checked = set()  # calls of modules without a rule that passed their check
        self.checked_once: set[tuple[str, ...]] = set()  # labels of calls whose backward passed a `RunningCheck`
        require_real_and_separate(model)

    @abstractmethod
    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the forward and backward passes inside the context; restore the model on exit."""

    def check_reached(self, captured: Capture) -> None:
        """Require of a finished capture that a layer was called and that every parameter with a gradient was measured."""
        trainable, reached = self.trained(), captured.reached
        if reached or any(p.grad is not None for p in trainable.values()):
            captured.require_loss()
        measured = reached - captured.unmeasured
        missed = [name for name, p in trainable.items() if p.grad is not None and p not in measured]
        if missed:
            raise UnsupportedLayerError(
                f"{missed[0]} gets a gradient outside of its module's forward, where no curvature rule can measure it. Move "
                "it into a small nn.Module that is called on the batch, or freeze it with requires_grad_(False). "
                f"Parameters: {name_some(missed)}."
            )
        if not reached:
            raise NoMeasurementError(
                "No trainable layer was called with gradients enabled, so there is nothing to measure. Run forward and "
                "backward inside the pass, on the model the engine was built for."
            )

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the model that are measured, by name."""
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and p not in self.left_out}

    def units(self) -> list[MeasuredModule]:
        """The modules whose calls are measured: modules with at least one measured parameter."""
        units = find_measured_modules(self.model)
        if not self.left_out:
            return units
        trained = ((unit, {p for _, p in unit.named_parameters() if p.requires_grad}) for unit in units)
        return [unit for unit, params in trained if params - self.left_out]

    @contextmanager
    def watching_model_call(self, captured: Capture, units: Iterable[MeasuredModule]) -> Iterator[None]:
        """Record the first call of an outermost module with equally many input and output rows, until the capture ends."""
        measured = {unit.module for unit in units}
        is_lightning = hasattr(self.model, "training_step")
        outermost = [self.model, *(self.model.children() if is_lightning else ())]
        record = Uncopied(captured.note_model_call)
        with ExitStack() as undo:
            undo.callback(captured.drop_nodes)
            undo.enter_context(captured.recorder)
            for module in outermost:
                if module not in measured and has_children(module):
                    undo.callback(module.register_forward_hook(record, with_kwargs=True).remove)
            yield
