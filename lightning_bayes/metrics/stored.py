"""The base class of metrics that need all examples at the end, because they sort them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat


class StoredMetric(Metric, ABC):
    """Stores columns of one value per example. ``update`` of a subclass calls `store`.

    The states are concatenated over processes and stored in the metric's dtype (``set_dtype`` changes it).

    Attributes:
        columns: Names of the states.
    """

    is_differentiable = False
    full_state_update = False

    columns: ClassVar[tuple[str, ...]]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.columns:
            self.add_state(name, [], dist_reduce_fx="cat")

    @abstractmethod
    def measure(self, *columns: Any, **options: Any) -> Any:
        """Compute the metric from the columns of all examples."""

    def store(self, *values: Tensor) -> None:
        """Add the columns of a batch, ``[batch]`` each."""
        for name, column in zip(self.columns, values, strict=True):
            getattr(self, name).append(column.detach().to(self.dtype))

    def compute(self) -> Any:
        """Return the value over all examples since the last reset; ``nan`` if it is undefined."""
        return self.measure(*map(self._stored, self.columns))

    def _stored(self, name: str) -> Tensor:
        """All values of a column, over all processes after synchronization."""
        state = getattr(self, name)
        if isinstance(state, list) and not state:  # torchmetrics raises an error
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return dim_zero_cat(state)
