"""One published setting, and the conversions between the papers' units and this package's.

weight of the NEW curvature (``ema_decay``)    β₂ = 1 - ema
heavy-ball momentum: buffer ← μ·buffer + g     β₁ = μ, and the learning rate times 1/(1-μ)
prior variance η                               δ = 1/η
first curvature s₀                             P₀ = Ñ s₀ + δ
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Preset:
    """Hyperparameters of one published experiment, as arguments of one callback.

    Attributes:
        name: Paper, data and network.
        callback: Name of the callback's class.
        arguments: Arguments of that callback. The augmentation factor ρ defaults to 1 and overrides the data module's.
        source: Where they were published.
        setting: The other settings of the run: network, data, batches, epochs, schedule.
        differs: Every known difference between the callback and the published run, and settings that the source omits.
    """

    name: str
    callback: str
    arguments: Mapping[str, Any]
    source: str
    setting: str
    differs: str

    def __post_init__(self) -> None:
        """Set ρ = 1 by default; otherwise the callback would use the data module's factor, which ignores the paper."""
        object.__setattr__(self, "arguments", {"data_augmentation_factor": 1.0, **self.arguments})


def rate_of_average(lr: float, momentum: float) -> float:
    """The learning rate for a running average of gradients that moves like `lr` with a heavy-ball buffer.

    Args:
        lr: Learning rate for a buffer that sums gradients.
        momentum: The buffer's factor.

    Returns:
        ``lr / (1 - momentum)``, rounded by `tidy`.

    Example:
        >>> rate_of_average(1e-4, momentum=0.9)
        0.001
    """
    return tidy(lr / (1 - momentum))


def tidy(value: float) -> float:
    """Round to twelve digits, so that 1 - 0.999 is 0.001."""
    return float(f"{value:.12g}")
