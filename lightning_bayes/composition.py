"""Configs by name: whole recipes, and compositions of a data set, a model and a method.

``cifar10+lenet+vogn`` lays ``data/cifar10.yaml``, ``models/lenet.yaml`` and ``methods/vogn.yaml`` over ``base.yaml``. The
result is an ordinary config of LightningCLI. Parts follow three more rules:

    values:  {image_size: 32}      replaces ${image_size} in every part
    with:    {lenet: {...}}        is laid over all parts if `lenet` is one of them
    callbacks+: [...]              is appended, as on the command line of LightningCLI

Parts of ``evaluation/`` join any composition: ``digits+lenet+vogn+posterior_scale``.

A registered model or data set needs no file, see `lightning_bayes.zoo.register_model`. Neither does a model of timm or
torchvision.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import import_module, resources
from itertools import product
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_bayes.errors import ConfigError
from lightning_bayes.zoo.registry import DATA, MODELS

KINDS: Final = ("data", "models", "methods")
EVALUATION: Final = "evaluation"  # parts that are added to a composition, any number of them
_ORDER: Final = ("data", "models", EVALUATION, "methods", "file")  # the method's callback stays the last in the list
_SOURCES: Final = ("timm/", "torchvision/")
_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")
_SHAPE: Final = ("num_classes", "in_channels", "image_size")


def recipes() -> dict[str, Path]:
    """The packaged configs that are whole.

    Returns:
        Their files by name, in alphabetical order.
    """
    return _files("recipes")


def parts(kind: str) -> dict[str, Path]:
    """The packaged parts of compositions.

    Args:
        kind: One of `KINDS`, or `EVALUATION`.

    Returns:
        Their files by name, in alphabetical order.

    Example:
        >>> list(parts("models"))
        ['alexnet', 'lenet', 'mlp', 'resnet18', 'vgg16']
    """
    return _files(kind)


def _files(folder: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted((_root() / folder).glob("*.yaml"))}


def _root() -> Path:
    return Path(str(resources.files("lightning_bayes.configs")))


def split_name(name: str) -> tuple[str, ...]:
    """The parts that a name is made of.

    Args:
        name: Parts joined by ``+``, or those of this package by ``_``.

    Returns:
        The parts; empty if the name is none of a composition.

    Example:
        >>> split_name("fashion_mnist_lenet_noisy_kfac"), split_name("digits+timm/resnet18"), split_name("diggits")
        (('fashion_mnist', 'lenet', 'noisy_kfac'), ('digits', 'timm/resnet18'), ())
    """
    if "+" in name:
        return tuple(name.split("+"))
    if any(name in parts(kind) for kind in (*KINDS, EVALUATION)) or _is_registered(name):
        return (name,)
    named = {"_".join(combined): combined for combined in product(*map(parts, KINDS))}
    return named.get(name, ())


def compose(names: Sequence[str]) -> dict[str, Any]:
    """Lay parts over each other.

    Args:
        names: The names of the parts: a packaged file, a registered model or data set, ``MODULE:NAME`` for one that the
            module registers, ``timm/NAME``, ``torchvision/NAME``, or the path of a YAML file.

    Returns:
        A config of LightningCLI.

    Raises:
        ConfigError: If there is no such part, two are of one kind, or a part needs a value that none sets.

    Example:
        >>> compose(["digits", "lenet", "vogn"])["model"]["init_args"]["model"]["init_args"]
        {'num_classes': 10, 'in_channels': 1, 'image_size': 8}
    """
    read = [_part(name) for name in names]
    kinds = [kind for kind, _ in read if kind in KINDS]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"{'+'.join(names)} has two parts of one kind ({', '.join(kinds)}). Leave one out.")
    layers = [content for _, content in sorted(read, key=lambda part: _ORDER.index(part[0]))]
    config: dict[str, Any] = {}
    for layer in (_read(_root() / "base.yaml"), *layers, *_company(layers, set(names))):
        _lay_over(config, {key: value for key, value in layer.items() if key != "with"})
    values = {"name": "_".join(re.sub(r"\W+", "_", Path(name).stem) for name in names), **config.pop("values")}
    if "in_channels" in values and "image_size" in values:
        values.setdefault("in_features", values["in_channels"] * values["image_size"] ** 2)
    missing = sorted({key for key in _placeholders(config) if key not in values})
    if missing:
        raise ConfigError(
            f"{'+'.join(names)} needs a value for {', '.join(missing)}. Name a data set that sets it, or add a part of your "
            f"own, +FILE.yaml with `values: {{{missing[0]}: ...}}`."
        )
    filled: dict[str, Any] = _filled(config, values)
    return filled


def _part(name: str) -> tuple[str, dict[str, Any]]:
    """Kind and content of a part."""
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return "file", _read(Path(name))
    for kind in (*KINDS, EVALUATION):
        if name in parts(kind):
            return kind, _read(parts(kind)[name])
    module, _, short = name.rpartition(":")
    if module:
        import_module(module)  # its models and data sets register themselves
    if short in DATA:
        return "data", _registered_data(short)
    if short in MODELS or short.startswith(_SOURCES):
        return "models", _registered_model(short)
    raise ConfigError(f"There is no part {name!r}. {nearest_names(name)}")


def nearest_names(name: str) -> str:
    """Names like a misspelled one, for messages.

    Args:
        name: A name that is not known.

    Returns:
        A sentence or two.

    Example:
        >>> nearest_names("digits_lenet_vgn").partition(" or ")[0]
        'Did you mean digits+lenet+vogn'
    """
    known = {*recipes(), *DATA, *MODELS, *(part for kind in (*KINDS, EVALUATION) for part in parts(kind))}
    whole = {"_".join(combined): "+".join(combined) for combined in product(*map(parts, KINDS))}
    close = [whole.get(found, found) for found in difflib.get_close_matches(name, sorted(known | whole.keys()), 3)]
    asked = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{asked}`lightning-bayes list configs|data|models|methods` prints all names."


def _is_registered(name: str) -> bool:
    return name in DATA or name in MODELS or name.startswith(_SOURCES)


def _registered_data(name: str) -> dict[str, Any]:
    module = DATA[name]
    known = {key: getattr(module, key, None) for key in _SHAPE}
    values = {key: value for key, value in known.items() if isinstance(value, int)}
    values |= getattr(module, "composed_values", {})
    return {"values": values, "data": {"class_path": f"{module.__module__}.{module.__qualname__}"}}


def _registered_model(name: str) -> dict[str, Any]:
    if name in MODELS:
        entry = MODELS[name]
        shape = [key for key in _SHAPE if key not in {"image_size"} - set(entry.options)]
        arguments = {**{key: f"${{{key}}}" for key in shape}, **entry.arguments}
        network = {"class_path": entry.class_path, "init_args": arguments}
    else:
        arguments = {"name": name, "num_classes": "${num_classes}", "in_channels": "${in_channels}"}
        network = {"class_path": "lightning_bayes.zoo.create_model", "init_args": arguments}
    return {"model": {"init_args": {"model": network}}}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8")) or {}
    return content


def _company(layers: Sequence[dict[str, Any]], names: set[str]) -> Iterator[dict[str, Any]]:
    for layer in layers:
        yield from (overlay for name, overlay in layer.get("with", {}).items() if name in names)


def _lay_over(config: dict[str, Any], layer: dict[str, Any]) -> None:
    for key, value in layer.items():
        if key.endswith("+"):
            config[key[:-1]] = [*config.get(key[:-1], []), *value]
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            _lay_over(config[key], value)
        else:
            config[key] = value


def _placeholders(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield from _PLACEHOLDER.findall(node)
    elif isinstance(node, (dict, list)):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _placeholders(inner)


def _filled(node: Any, values: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    if isinstance(node, str) and (whole := _PLACEHOLDER.fullmatch(node)):
        return values[whole[1]]
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), node) if isinstance(node, str) else node
