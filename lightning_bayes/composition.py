"""Configs by name: recipes, and compositions of a data set, a model and a method.

``cifar10+lenet+vogn`` merges ``base.yaml``, ``data/cifar10.yaml``, ``models/lenet.yaml`` and ``methods/vogn.yaml``, in this
order; later files win. The result is an ordinary config of LightningCLI. Three keys have a special meaning in a part:

    values:  {image_size: 32}      replaces ${image_size} in every part
    with:    {lenet: {...}}        is merged last if the composition contains `lenet`
    callbacks+: [...]              is appended to the list, as on the command line of LightningCLI

Parts of ``evaluation/`` can be added to any composition: ``digits+lenet+vogn+posterior_scale``.

Registered models and data sets (`lightning_bayes.zoo.register_model`) and the models of timm and torchvision need no file.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module, resources
from itertools import product
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_bayes.errors import ConfigError
from lightning_bayes.zoo.registry import DATA, MODELS, import_path

KINDS: Final = ("data", "models", "methods")
EVALUATION: Final = "evaluation"  # a composition can have any number of these parts
# The method comes after data and evaluation: options on the command line address the last callback in the list.
_ORDER: Final = ("data", "models", EVALUATION, "methods", "file")
_SOURCES: Final = ("timm/", "torchvision/")
_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")
_SHAPE: Final = ("num_classes", "in_channels", "image_size")


def recipes() -> dict[str, Path]:
    """The files of the packaged recipes, which are complete configs, by name in alphabetical order."""
    return parts("recipes")


def parts(kind: str) -> dict[str, Path]:
    """The files of the packaged parts of a kind, by name in alphabetical order.

    Args:
        kind: One of `KINDS`, or `EVALUATION`.

    Returns:
        Path by name.

    Example:
        >>> list(parts("models"))
        ['alexnet', 'lenet', 'mlp', 'resnet18', 'vgg16']
    """
    return {path.stem: path for path in sorted((_root() / kind).glob("*.yaml"))}


def _root() -> Path:
    return Path(str(resources.files("lightning_bayes.configs")))


def split_name(name: str) -> tuple[str, ...]:
    """Split the name of a composition into its parts.

    Args:
        name: Parts joined by ``+``; packaged parts can also be joined by ``_``.

    Returns:
        The parts; empty if no composition has this name.

    Example:
        >>> split_name("fashion_mnist_lenet_noisy_kfac"), split_name("digits+timm/resnet18"), split_name("diggits")
        (('fashion_mnist', 'lenet', 'noisy_kfac'), ('digits', 'timm/resnet18'), ())
    """
    if "+" in name:
        return tuple(name.split("+"))
    return (name,) if name.startswith(_SOURCES) else _known_names().get(name, ())


def _known_names() -> dict[str, tuple[str, ...]]:
    """Every part by its name, and the parts of every packaged DATA × MODEL × METHOD by their names joined with ``_``."""
    compositions = {"_".join(names): names for names in product(*map(parts, KINDS))}
    singles = [*DATA, *MODELS, *(name for kind in (*KINDS, EVALUATION) for name in parts(kind))]
    return compositions | {name: (name,) for name in singles}


def compose(names: Sequence[str]) -> dict[str, Any]:
    """Merge parts into one config.

    Args:
        names: Parts: a packaged part, a registered model or data set, ``MODULE:NAME`` for one that MODULE registers,
            ``timm/NAME``, ``torchvision/NAME``, or the path of a YAML file.

    Returns:
        A config of LightningCLI.

    Raises:
        ConfigError: If a part does not exist, two parts are of the same kind, or no part sets a value that another needs.

    Example:
        >>> compose(["digits", "lenet", "vogn"])["model"]["init_args"]["model"]["init_args"]
        {'num_classes': 10, 'in_channels': 1, 'image_size': 8}
    """
    read_parts = [_part(name) for name in names]
    kinds = [kind for kind, _ in read_parts if kind in KINDS]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"{'+'.join(names)} has two parts of the same kind ({', '.join(kinds)}). Remove one.")
    layers = [content for _, content in sorted(read_parts, key=lambda part: _ORDER.index(part[0]))]
    config: dict[str, Any] = {}
    for layer in (_read(_root() / "base.yaml"), *layers, *_overlays(layers, set(names))):
        _merge(config, {key: value for key, value in layer.items() if key != "with"})
    values = {"name": "_".join(re.sub(r"\W+", "_", Path(name).stem) for name in names), **config.pop("values")}
    if "in_channels" in values and "image_size" in values:
        values.setdefault("in_features", values["in_channels"] * values["image_size"] ** 2)
    text = json.dumps(config)
    missing = sorted(set(_PLACEHOLDER.findall(text)) - values.keys())
    if missing:
        raise ConfigError(
            f"{'+'.join(names)} needs a value for {', '.join(missing)}. Choose a data set that sets it, or add your own "
            f"part, +FILE.yaml with `values: {{{missing[0]}: ...}}`."
        )
    # A string that is only a placeholder gets the type of the value.
    typed = re.sub(f'"{_PLACEHOLDER.pattern}"', lambda match: json.dumps(values[match[1]]), text)
    filled: dict[str, Any] = json.loads(_PLACEHOLDER.sub(lambda match: json.dumps(str(values[match[1]]))[1:-1], typed))
    return filled


def _part(name: str) -> tuple[str, dict[str, Any]]:
    """The kind and the content of a part."""
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return "file", _read(Path(name))
    for kind in (*KINDS, EVALUATION):
        if name in parts(kind):
            return kind, _read(parts(kind)[name])
    module, _, short = name.rpartition(":")
    if module:
        import_module(module)  # importing the module registers its models and data sets
    if short in DATA:
        return "data", _registered_data(short)
    if short in MODELS or short.startswith(_SOURCES):
        return "models", _registered_model(short)
    raise ConfigError(f"There is no part {name!r}. {nearest_names(name)}")


def nearest_names(name: str) -> str:
    """Suggest names similar to an unknown one, for an error message.

    Args:
        name: The unknown name.

    Returns:
        One or two sentences.

    Example:
        >>> nearest_names("digits_lenet_vgn").partition(" or ")[0]
        'Did you mean digits+lenet+vogn'
    """
    known = _known_names()
    matches = difflib.get_close_matches(name, sorted({*recipes(), *known}), 3)
    close = ["+".join(known.get(match, [match])) for match in matches]
    question = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{question}`lightning-bayes list configs|data|models|methods` prints all names."


def _registered_data(name: str) -> dict[str, Any]:
    module = DATA[name]
    shape = {key: getattr(module, key, None) for key in _SHAPE}
    values = {key: value for key, value in shape.items() if isinstance(value, int)}
    values |= getattr(module, "composed_values", {})
    return {"values": values, "data": {"class_path": import_path(module)}}


def _registered_model(name: str) -> dict[str, Any]:
    if name in MODELS:
        entry = MODELS[name]
        shape = [key for key in _SHAPE if key != "image_size" or key in entry.options]
        arguments = {**{key: f"${{{key}}}" for key in shape}, **entry.arguments}
        network = {"class_path": entry.class_path, "init_args": arguments}
    else:
        arguments = {"name": name, "num_classes": "${num_classes}", "in_channels": "${in_channels}"}
        network = {"class_path": "lightning_bayes.zoo.create_model", "init_args": arguments}
    return {"model": {"init_args": {"model": network}}}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8")) or {}
    return content


def _overlays(layers: Sequence[dict[str, Any]], names: set[str]) -> Iterator[dict[str, Any]]:
    for layer in layers:
        yield from (overlay for name, overlay in layer.get("with", {}).items() if name in names)


def _merge(config: dict[str, Any], layer: dict[str, Any]) -> None:
    for key, value in layer.items():
        if key.endswith("+"):
            config[key[:-1]] = [*config.get(key[:-1], []), *value]
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value
