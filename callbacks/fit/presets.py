"""Published settings of the callbacks: ``VOGNCallback.from_preset("osawa2019-cifar10-resnet18")``.

The settings are data, one file per paper in ``configs/presets/``, in this package's units; the head of each file says how
they follow from the paper's. A preset sets only the callback's arguments. Network, data, batches, epochs and learning-rate
schedule belong to the run; each `Preset` describes them, and lists every known difference from the published run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import Any, final

import yaml

from lightning_bayes.errors import HyperparameterError


@final
@dataclass(frozen=True)
class Preset:
    """Hyperparameters of one published experiment, as arguments of one callback.

    Attributes:
        name: Paper, data and network.
        callback: Name of the callback's class.
        arguments: Arguments of that callback. Each preset sets the augmentation factor ρ, 1 unless the source has another,
            because the data module's would take its place.
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


@cache
def all_presets() -> tuple[Preset, ...]:
    """The presets of all callbacks, paper by paper."""
    folder = resources.files("lightning_bayes.configs") / "presets"
    papers = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    entries = [entry for paper in papers for entry in yaml.safe_load(paper.read_text("utf-8"))]
    return tuple(Preset(**{key: _built(value) for key, value in entry.items()}) for entry in entries)


def _built(value: Any) -> Any:
    """A value of a file as a callback takes it: a list becomes a tuple, and a ``class_path`` an instance of its class."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict) and "class_path" in value:
        module, _, name = value["class_path"].rpartition(".")
        return getattr(import_module(module), name)(**value["init_args"])
    return {key: _built(part) for key, part in value.items()} if isinstance(value, dict) else value


def presets_of(callback: str) -> dict[str, Preset]:
    """The presets of the callback with this class name, by name."""
    return {preset.name: preset for preset in all_presets() if preset.callback == callback}


def find_preset(callback: str, name: str) -> Preset:
    """The preset of a callback with this name; raises `HyperparameterError`, listing all presets, if there is none."""
    presets = presets_of(callback)
    if name not in presets:
        others = sorted({preset.callback for preset in all_presets()} - {callback})
        lists = [f"{callback} has {', '.join(presets) or 'none'}"]
        lists += [f"{other} has {', '.join(presets_of(other))}" for other in others]
        raise HyperparameterError(f"{callback} has no preset {name!r}. {'; '.join(lists)}.")
    return presets[name]
