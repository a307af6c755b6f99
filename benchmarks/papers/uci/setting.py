"""Hyperparameters of the methods."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SMALL = 2000  # rows; both papers use smaller batches for smaller sets


@dataclass(frozen=True)
class Setting:
    """Hyperparameters; published ones unless a method's file says otherwise."""

    epochs: int
    batch: tuple[int, int]
    mc_samples: tuple[int, int]
    lr: float
    betas: tuple[float, float]
    decays: bool
    prior_precision: float = 1.0
    num_hidden: int = 50
    eval_samples: int = 100
    inverse_interval: int = 10

    def at_most(
        self, num_data: int, epochs: int | None = None, steps: int | None = None, mc_samples: int | None = None
    ) -> Setting:
        """Limit epochs, updates (rounded up to whole epochs) and K for N data; None does not limit."""
        limits = [self.epochs, epochs]
        if steps is not None:
            limits.append(math.ceil(steps / math.ceil(num_data / self.batch_for(num_data))))
        small, large = (count if mc_samples is None else min(count, mc_samples) for count in self.mc_samples)
        return replace(self, epochs=min(limit for limit in limits if limit is not None), mc_samples=(small, large))

    def batch_for(self, num_data: int) -> int:
        """Rows per batch."""
        return self.batch[num_data >= SMALL]

    def samples_for(self, num_data: int) -> int:
        """K."""
        return self.mc_samples[num_data >= SMALL]


# Appendix C.1 and the authors' configurations.
ZHANG = Setting(epochs=1000, batch=(10, 100), mc_samples=(10, 10), lr=0.01, betas=(0.9, 0.999), decays=True)
# Appendix J.1, with γ₁ and γ₂ as in the authors' code; the text has them swapped. They tune prior and noise precision.
KHAN = Setting(epochs=40, batch=(32, 128), mc_samples=(10, 5), lr=0.01, betas=(0.9, 0.99), decays=False)
# Gal & Ghahramani 2016: 400 epochs of Adam with its default rate. Their 10,000 samples at test time are 100 here.
GAL = Setting(epochs=400, batch=(128, 128), mc_samples=(1, 1), lr=1e-3, betas=(0.9, 0.999), decays=False)
