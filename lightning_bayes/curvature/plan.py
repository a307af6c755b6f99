"""What is settled once for passes of a kind, and what makes it be settled again.

The measured modules and their rules follow from the modules of the model, their types and modes, and from the parameters,
their devices and ``requires_grad``. A layer that is replaced, parametrised, frozen, moved or given another ``forward``
changes one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, final

import torch.distributed as dist
from torch import nn

from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules


@final
class UnitPlan:
    """The units of a model; they keep its parameters alive, so that the identities in the key stay theirs."""

    def __init__(
        self, model: nn.Module, find: Callable[[nn.Module], list[MeasuredModule]] = find_measured_modules
    ) -> None:
        self._model, self._find = model, find
        self._key: Hashable = None
        self._units: list[MeasuredModule] = []

    def units(self, left_out: Collection[nn.Parameter] = ()) -> list[MeasuredModule]:
        """The units with a trained parameter that is not left out; found again only if the model has changed."""
        modules = [(id(m), type(m), vars(m).get("forward"), m.training) for m in self._model.modules()]
        params = [(id(p), p.requires_grad, p.device) for p in self._model.parameters()]
        is_joined = dist.is_available() and dist.is_initialized()
        key = *modules, *params, frozenset(map(id, left_out)), is_joined
        if key != self._key:
            self._units = [
                unit
                for unit in self._find(self._model)
                if any(param.requires_grad and param not in left_out for param in unit.params.values())
            ]
            self._key = key
        return self._units

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_key": None, "_units": []}  # identities mean nothing in a copy
