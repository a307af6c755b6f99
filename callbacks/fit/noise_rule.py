"""Noise that follows the fit: κ of classifiers with normalisation layers, from the losses of each epoch.

    κ ← κ/2 + κ₁/2 · max(0, 0.8 min ℓ_val - ℓ) / ℓ₀

ℓ is the training loss at weight samples, averaged over an epoch; ℓ_val the validation NLL at the posterior mean; ℓ₀ the
training loss of the first batches. A network that memorises gets noise, which keeps it from memorising more; one that does
not, or that generalises, gets little. Half of the old κ stays, because noise raises ℓ: without it, κ would swing between
nothing and too much. The smallest validation NLL so far counts: with BatchNorm, single epochs are far above it. Without
validation data nothing tells a network that memorises from one that generalises, and κ stays small. The rule is a heuristic;
docs/defaults.md has the numbers, and the lab notes those of other rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

FIRST_BATCHES: Final = 5  # of ℓ₀
MEMORISED: Final = 0.8  # of min ℓ_val: a smaller training loss counts as memorised


@final
class NoiseRule:
    """Moves κ at the start of each epoch of a fit but the first."""

    def __init__(self) -> None:
        self.path = list[float]()  # κ / κ₁ of these epochs, from 0 to 1
        self._first = list[float]()  # losses of the first batches
        self._sum, self._count = torch.zeros(()), 0  # of the losses of this epoch
        self._lowest = math.inf  # validation NLL

    @property
    def share(self) -> float:
        """κ / κ₁ of this epoch."""
        return self.path[-1] if self.path else 0.0

    def add(self, outputs: Any, accumulated: int = 1) -> None:
        """Add the loss of a training step, which Lightning divides by the number of accumulated batches."""
        if not isinstance(outputs, dict) or "loss" not in outputs:
            return
        loss = outputs["loss"].detach() * accumulated
        if len(self._first) < FIRST_BATCHES:
            self._first.append(float(loss))
        self._sum, self._count = self._sum.to(loss.device) + loss, self._count + 1

    def add_validation(self, nll: float) -> None:
        """Note the NLL of a validation."""
        self._lowest = min(self._lowest, nll) if math.isfinite(nll) else self._lowest

    def start_epoch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Move κ by the losses since the last call, if there are any; `reduce` sums over processes."""
        if not self._count:
            return
        numbers = [self._count, sum(self._first), len(self._first)]
        total, count, first, firsts = reduce(torch.cat([self._sum[None], self._sum.new_tensor(numbers)])).tolist()
        self._sum, self._count = torch.zeros(()), 0
        share = self.share
        if math.isfinite(total + self._lowest) and first > 0:
            memorised = max(0.0, MEMORISED * self._lowest - total / count) / (first / firsts)
            share = 0.5 * share + 0.5 * min(1.0, memorised)
        self.path.append(share)

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint, which may be written within an epoch."""
        sums = {"sum": float(self._sum), "count": self._count, "first": list(self._first), "lowest": self._lowest}
        return {"path": list(self.path), **sums}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state`; checkpoints of earlier versions have none."""
        if state is None:
            return
        self.path, self._first, self._lowest = list(state["path"]), list(state["first"]), state["lowest"]
        self._sum, self._count = torch.tensor(state["sum"]), state["count"]
