"""Published settings of the callbacks, one file per paper: ``VOGNCallback.from_preset("osawa2019-cifar10-resnet18")``.

A preset sets only the callback's arguments. Network, data, batches, epochs and learning-rate schedule belong to the run.
Each `Preset` describes them, and lists every known difference between the callback and the published run.
"""

from __future__ import annotations

from typing import Final

from lightning_bayes.callbacks.presets import (
    eschenhagen2019,
    khan2017,
    khan2018,
    osawa2019,
    osawa2019_kfac,
    shen2024,
    zhang2018,
    zhang2018_kfac,
)
from lightning_bayes.callbacks.presets.preset import Preset
from lightning_bayes.errors import HyperparameterError

ALL: Final[tuple[Preset, ...]] = (
    *khan2017.PRESETS,
    *khan2018.PRESETS,
    *zhang2018.PRESETS,
    *zhang2018_kfac.PRESETS,
    *osawa2019.PRESETS,
    *osawa2019_kfac.PRESETS,
    *eschenhagen2019.PRESETS,
    *shen2024.PRESETS,
)

__all__ = ["ALL", "Preset", "find_preset", "presets_of"]


def presets_of(callback: str) -> dict[str, Preset]:
    """The presets of the callback with this class name, by name."""
    return {preset.name: preset for preset in ALL if preset.callback == callback}


def find_preset(callback: str, name: str) -> Preset:
    """Find a preset of a callback.

    Args:
        callback: Name of the callback's class.
        name: The preset's name.

    Returns:
        The preset.

    Raises:
        HyperparameterError: If there is no such preset; lists the presets of all callbacks.
    """
    presets = presets_of(callback)
    if name not in presets:
        others = sorted({preset.callback for preset in ALL} - {callback})
        lists = [f"{callback} has {', '.join(presets) or 'none'}"]
        lists += [f"{other} has {', '.join(presets_of(other))}" for other in others]
        raise HyperparameterError(f"{callback} has no preset {name!r}. {'; '.join(lists)}.")
    return presets[name]
