"""``lightning-bayes list``: print one kind of config, or the presets of the callbacks, one per line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.composition import parts, recipes
from lightning_bayes.zoo.registry import DATA, MODELS

Entry = tuple[str, str]  # name, description


def configs() -> Iterator[Entry]:
    """Recipes, which are complete configs."""
    return _described(recipes())


def data() -> Iterator[Entry]:
    """Data sets."""
    yield from _described(parts("data"))
    yield from ((name, DATA[name].__name__) for name in sorted(DATA.keys() - parts("data").keys()))


def models() -> Iterator[Entry]:
    """Models."""
    yield from _described(parts("models"))
    yield from ((name, MODELS[name].class_path) for name in sorted(MODELS.keys() - parts("models").keys()))
    yield "timm/NAME", "any model of timm"
    yield "torchvision/NAME", "any model of torchvision"


def methods() -> Iterator[Entry]:
    """Methods, and the parts that add to their evaluation."""
    yield from _described(parts("methods"))
    yield from _described(parts("evaluation"))


def presets() -> Iterator[Entry]:
    """Published settings, for ``CALLBACK.from_preset(NAME)``."""
    from lightning_bayes import callbacks

    for name in sorted(callbacks.__all__):
        callback = getattr(callbacks, name)
        if hasattr(callback, "presets"):
            yield from ((preset, f"{name}.from_preset({preset!r})") for preset in callback.presets())


KINDS: Final = {kind.__name__: kind for kind in (configs, data, models, methods, presets)}


def run(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow ``lightning-bayes list``."""
    parser = argparse.ArgumentParser(
        "lightning-bayes list", description="Print all names of one kind, one per line.", allow_abbrev=False
    )
    parser.add_argument(
        "kind",
        choices=KINDS,
        help="recipes, or parts for --config DATA+MODEL+METHOD",
    )
    kind = parser.parse_args(arguments).kind
    entries = list(KINDS[kind]())
    width = max(len(name) for name, _ in entries)
    for name, description in entries:
        print(f"{name:{width}}  {description}".rstrip())


def _described(files: dict[str, Path]) -> Iterator[Entry]:
    """Names of files, described by the comment in their first line."""
    for name, path in files.items():
        first_line = path.read_text("utf-8").partition("\n")[0]
        yield name, first_line.removeprefix("#").strip() if first_line.startswith("#") else ""
