"""What is settled once for the passes of a kind, and what makes it be settled again.

A `PassPlan` belongs to the model as it is: its modules, their types, modes and hooks, and its parameters, their devices and
``requires_grad``. A layer that is replaced, parametrised, frozen, moved or given another ``forward`` gets another plan. It
keeps the measured modules, the layouts that were found, and the parameters and calls that passed their checks.

A plan also keeps the reading of each loss, by the calls of the layers with their sizes, and by what the tape tells of the
graph between them and the loss: functions, shapes, numbers. A reading is not kept if it depends on the values of tensors:
rows chosen by a tensor, products with numbers in tensors, ignored targets, explicit per-example losses, and layouts that
are not settled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, final

import torch.distributed as dist
from torch import nn

from lightning_bayes.curvature.layout_probe import LayoutProbe, PassLayouts
from lightning_bayes.curvature.loss import LossRecord
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.private_torch import CALL_HOOKS

_MOST: Final = 64  # plans of a model, and readings of a plan; sequences may have any length


class LossReading(NamedTuple):
    """What was read of a loss."""

    scale: LossRecord
    divisors: frozenset[int]
    layouts: PassLayouts  # of all calls in the pass


@final
@dataclass(eq=False)
class PassPlan:
    """What is settled for the passes of a model as it is."""

    units: list[MeasuredModule]
    probe: LayoutProbe = field(default_factory=LayoutProbe)
    checked_once: set[tuple[str, ...]] = field(default_factory=set)  # labels of calls that passed a `RunningCheck`
    readings: dict[Hashable, LossReading] = field(default_factory=dict)

    def keep(self, key: Hashable, reading: LossReading) -> None:
        """Keep the reading of a loss without its tensors, unless its key is None or its layouts are not settled."""
        if key is not None and self.probe.knows(reading.layouts) and not reading.layouts.error:
            _put(self.readings, key, reading._replace(scale=replace(reading.scale, call=None)))


@final
class Plans:
    """The plans of a model; their units keep its parameters alive, so that the identities in the keys stay theirs."""

    def __init__(self, model: nn.Module, find: Callable[..., list[MeasuredModule]] = find_measured_modules) -> None:
        self._model, self._find = model, find
        self._whole: set[nn.Module] = set()  # modules whose parameters are not measured at operations
        self._parts: Hashable = None  # the modules and parameters that the plans are for
        self._plans: dict[Hashable, PassPlan] = {}

    def plan(self, left_out: Collection[nn.Parameter] = (), at_operations: bool = False) -> PassPlan:
        """The plan for the model as it is; its units have a trained parameter that is not left out."""
        modules, params = list(self._model.modules()), list(self._model.parameters())
        hooks = [len(getattr(m, kind, ())) for m in modules for kind in CALL_HOOKS]
        parts = *[(id(m), type(m), vars(m).get("forward")) for m in modules], *hooks, *map(id, params)
        if parts != self._parts:
            self._parts = parts
            self._plans.clear()
        is_joined = dist.is_available() and dist.is_initialized()
        modes, flags = [m.training for m in modules], [(p.requires_grad, p.device) for p in params]
        key = *modes, *flags, frozenset(map(id, left_out)), is_joined, at_operations
        found = self._plans.get(key)
        if found is None:
            units = self._find(self._model, at_operations=at_operations, whole=self._whole)
            trained = [u for u in units if any(p.requires_grad and p not in left_out for p in u.params.values())]
            found = _put(self._plans, key, PassPlan(trained))
        return found

    def replan(self, plan: PassPlan, lost: Collection[nn.Parameter], calls: Mapping[nn.Parameter, int]) -> bool:
        """Measure modules as a whole from the next pass on if a function took a parameter that was not measured there.

        Args:
            plan: The plan of the pass.
            lost: The parameters whose contributions do not add up to their gradients.
            calls: The number of measured calls by parameter.

        Returns:
            Whether there are such modules.
        """
        units, found = [unit for unit in plan.units if unit.at_operations], set[nn.Module]()
        for param in lost:
            own = [unit.module for unit in units if param in set(unit.params.values())]
            around = [] if calls[param] else [unit.module for unit in units if param in set(unit.module.parameters())]
            found.update((own or around)[-1:])  # the innermost
        if found:
            self._whole |= found
            self._plans.clear()
        return bool(found)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_parts": None, "_plans": {}}  # identities mean nothing in a copy


def _put(kept: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    """Put a value into a dictionary that drops its oldest."""
    if len(kept) >= _MOST:
        del kept[next(iter(kept))]
    kept[key] = value
    return value
