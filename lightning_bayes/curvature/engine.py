"""Engines: they open a capture around one forward and backward pass and read per-example squares from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.example_probe import ExampleProbe
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.curvature.parameters import require_real_and_separate
from lightning_bayes.curvature.whole_call import NoteWhole
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import NoMeasurementError, UnsupportedLayerError, name_some
from lightning_bayes.private_torch import has_children

EngineName: TypeAlias = Literal["fused", "backpack"]


class AbstractEngine(ABC):
    """Measures the per-example squared gradients of a model during ordinary passes.

    Args:
        model: The model; its parameters are found by identity, so wrapping it later changes nothing.
        loss_reduction: How losses reduce their examples.
        workspace_mib: Memory in MiB that a rule may fill at once with values of single examples.

    Class attributes:
        takes_spread: Whether parameters may be spread over processes.
    """

    takes_spread: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        self.model = model
        self.loss_reduction = loss_reduction
        self.workspace = Workspace(workspace_mib)
        self.left_out: set[nn.Parameter] = set()  # parameters whose squares are not needed
        self.probe = ExampleProbe(loss_reduction)
        self.has_warned_of_loop = False
        require_real_and_separate(model, takes_spread=self.takes_spread)

    @abstractmethod
    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the forward and backward passes inside the context; leave the model as it was."""

    def check_reached(self, captured: Capture) -> None:
        """Require squares for each parameter that has a gradient.

        Args:
            captured: A finished capture.

        Raises:
            UnsupportedLayerError: Listing every parameter that backward reached but no rule did.
            NoMeasurementError: If no layer was called at all.
        """
        named = self.model.named_parameters()
        trainable = {name: p for name, p in named if p.requires_grad and p not in self.left_out}
        reached = captured.reached
        if reached or any(p.grad is not None for p in trainable.values()):
            captured.require_loss()
        beside = self.used_beside_layers(captured)
        missed = [name for name, p in trainable.items() if p.grad is not None and (p not in reached or p in beside)]
        if missed:
            raise UnsupportedLayerError(
                f"{missed[0]} gets a gradient outside of its module's forward, where no curvature rule reaches it. Move it "
                "into a small nn.Module that is called with the batch, or freeze it with requires_grad_(False). Parameters: "
                f"{name_some(missed)}."
            )
        if not reached:
            raise NoMeasurementError(
                "No trainable layer was called with gradients on, so there is nothing to measure. Run forward and "
                "backward inside the pass, on the model the engine was built for."
            )

    def measured_parameters(self, among: Iterable[Tensor]) -> list[nn.Parameter]:
        """The model's trained parameters among some tensors, except for those that are left out."""
        found = set(among)
        if not found:
            return []
        return [p for p in self.model.parameters() if p in found and p.requires_grad and p not in self.left_out]

    def units(self) -> list[MeasuredModule]:
        """The modules whose calls are measured: those with a trainable parameter that is not left out."""
        units = find_measured_modules(self.model)
        if not self.left_out:
            return units
        trained = ((unit, {p for _, p in unit.named_parameters() if p.requires_grad}) for unit in units)
        return [unit for unit, params in trained if params - self.left_out]

    @contextmanager
    def watching_whole(self, captured: Capture) -> Iterator[None]:
        """Note the first call of one of the model's outermost modules that takes and returns equally many rows.

        Args:
            captured: Learns of it.

        Yields:
            Nothing.
        """
        units = {unit.module for unit in self.units()}
        is_lightning = hasattr(self.model, "training_step")
        outermost = [self.model, *(self.model.children() if is_lightning else ())]
        whole = [module for module in outermost if module not in units and has_children(module)]

        note = NoteWhole(captured)
        with ExitStack() as undo:
            for module in whole:
                undo.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            yield

    def detaches(self, unit: MeasuredModule, captured: Capture) -> bool:
        """Whether calls of `unit` run on detached weights and so are not uses in the loss's graph."""
        return False

    def used_beside_layers(self, captured: Capture) -> set[Tensor]:
        """Parameters that the loss uses more often than their layers were called."""
        if not captured.uses:
            return set()
        calls: Counter[Tensor] = Counter()
        for unit in self.units():
            if not self.detaches(unit, captured):
                calls.update(dict.fromkeys(unit.module.parameters(), captured.calls_of[unit.label]))
        taken = captured.taken_beside
        return {param for param, count in captured.uses.items() if count > calls[param] and param not in taken}
