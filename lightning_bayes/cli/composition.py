"""The values of ``--config``: files, recipes by name, and compositions ``DATA+MODEL+METHOD`` of packaged parts.

``cifar10+lenet5+vogn`` stands for the configs ``base.yaml``, ``data/cifar10.yaml``, the model ``lenet5`` and
``methods/vogn.yaml``, which LightningCLI merges in this order. Two keys of a part have a special meaning:

    values:  {image_size: 32}      replaces ${image_size} in every part
    with:    {lenet5: {...}}       is a further config after this part if the composition contains `lenet5`

Data sets and models are those of `lightning_bayes.zoo.register_data` and `create_model`: a file in ``data/`` or ``models/``
adds settings to one of them. ``MODULE:NAME`` stands for what a module registers under this name, or for its callback or
optimizer. Parts of ``evaluation/`` can be added to any composition. Nothing here imports torch, except
for a composition itself.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_bayes.errors import ConfigError

CONFIG_OPTIONS: Final = ("-c", "--config")
KINDS: Final = ("data", "models", "evaluation", "methods")  # options address the last callback, which is the method's
_SOURCES: Final = ("timm/", "torchvision/")
_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")
_SHAPE: Final = ("num_classes", "in_channels", "image_size")
# A name in the source of the registry's entries, and the first line of the next docstring.
_REGISTERED: Final = re.compile(r'^@register_(?:data|model)\("(\w+)"(?=[\s\S]*?"""([^\n"]+))', re.MULTILINE)
_CARD_METRIC: Final = re.compile(r"^\| (test/cls/Acc|test/cls/NLL|test/cal/ECE|ood/AUROC) \| (\S+) \|", re.MULTILINE)


def split_options(words: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each of some options with its value, empty if it is missing; or the empty string and another word."""
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        yield (option, value if equals else next(remaining, "")) if option in options else ("", word)


def recipes() -> dict[str, Path]:
    """The packaged recipes, which are complete configs: file by name."""
    return parts("recipes")


def parts(kind: str) -> dict[str, Path]:
    """The packaged parts of one of `KINDS`: file by name."""
    folder = Path(str(resources.files("lightning_bayes.configs"))) / kind
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def known(kind: str) -> dict[str, str]:
    """A description by the name of every recipe or part of one of `KINDS`, from the first line of its file, sorted."""
    found = {name: path.read_text("utf-8").partition("\n")[0].lstrip("# ") for name, path in parts(kind).items()}
    if kind in {"data", "models"}:
        # The registry's names are in the source; asking the registry would import torch, which takes seconds.
        for path in sorted(_zoo(kind).glob("*.py")):
            for name, description in _REGISTERED.findall(path.read_text("utf-8")):
                found.setdefault(name, description)
    return dict(sorted(found.items()))


def _zoo(folder: str) -> Path:
    """A folder of the zoo, found without importing it."""
    spec = find_spec("lightning_bayes.zoo")
    return Path(next(iter(spec.submodule_search_locations or [""])) if spec is not None else "", folder)


def packaged_posteriors() -> dict[str, str]:
    """A description by the name of every posterior in this package, from the metrics on its model card."""
    cards = sorted(_zoo("posteriors").glob("*.md"))
    rows = {card.stem: dict(_CARD_METRIC.findall(card.read_text("utf-8"))) for card in cards}
    return {name: ", ".join(f"{key} {value}" for key, value in metrics.items()) for name, metrics in rows.items()}


def packaged_presets() -> list[tuple[str, str]]:
    """Name and callback of every preset in this package, in alphabetical order."""
    entries = [entry for path in parts("presets").values() for entry in yaml.safe_load(path.read_text("utf-8"))]
    return sorted((entry["name"], entry["callback"]) for entry in entries)


def configs_of(name: str) -> list[str]:
    """Files and YAML texts for LightningCLI to merge in order, from one value of ``--config``."""
    require_known(name)
    if _is_config(name):
        return [name]
    return [str(recipes()[name])] if name in recipes() else _composition(name.split("+"))


def require_known(name: str) -> None:
    """Raise ConfigError, with the nearest names, unless `configs_of` can resolve a name."""
    if _is_config(name) or name in recipes():
        return
    names = {part for kind in KINDS for part in known(kind)}
    for part in name.split("+"):
        module, _, short = part.rpartition(":")
        if not (module or part in names or part in _registry_names() or part.startswith(_SOURCES) or _is_file(part)):
            known_names = sorted({*recipes(), *names})
            close = _split(name, names) or difflib.get_close_matches(short, known_names, 3, 0.5)
            question = f" Did you mean {' or '.join(close)}?" if close else ""
            whole = "" if part == name else f" of {name}"
            raise ConfigError(
                f"There is no part {part!r}{whole}, and no such file in {Path.cwd()}.{question} A config is "
                "DATA+MODEL+METHOD, a recipe or a file; `lightning-bayes list configs|data|models|methods` prints all names."
            )


def _registry_names() -> set[str]:
    """Names that other packages have registered, if anything has imported the registry."""
    import sys

    registry = sys.modules.get("lightning_bayes.zoo.registry")
    return {*registry.DATA, *registry.MODELS} if registry is not None else set()


def _split(name: str, names: set[str]) -> list[str]:
    """The composition that a name with underscores may mean, such as digits_lenet5_vogn."""
    words = name.removesuffix(".yaml").split("_")
    for first in range(1, len(words)):
        for second in range(first + 1, len(words)):
            found = ["_".join(words[:first]), "_".join(words[first:second]), "_".join(words[second:])]
            if all(part in names for part in found):
                return ["+".join(found)]
    return []


def _is_config(name: str) -> bool:
    return "://" in name or "{" in name or "\n" in name or (_is_file(name) and "+" not in name)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml", ".json")) and Path(name).is_file()


def _composition(names: Sequence[str]) -> list[str]:
    read_parts = sorted((_part(name) for name in names), key=lambda part: [*KINDS, "file"].index(part[0]))
    kinds = [kind for kind, _ in read_parts if kind not in {"evaluation", "file"}]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"{'+'.join(names)} has two parts of the same kind ({', '.join(kinds)}). Remove one.")
    base = _read(Path(str(resources.files("lightning_bayes.configs"))) / "base.yaml")
    layers = [
        layer for part in (base, *(content for _, content in read_parts)) for layer in _with_overlays(part, names)
    ]
    values = {"name": "_".join(re.sub(r"\W+", "_", Path(name.rpartition(":")[2]).stem) for name in names)}
    for layer in layers:
        values |= layer.pop("values", {})
    texts = [json.dumps(layer) for layer in layers if layer]
    missing = sorted(set(_PLACEHOLDER.findall("".join(texts))) - values.keys())
    if missing:
        raise ConfigError(
            f"{'+'.join(names)} needs a value for {', '.join(missing)}. Choose a data set that sets it, or add your own "
            f"part, +FILE.yaml with `values: {{{missing[0]}: ...}}`."
        )
    return [_filled(text, values) for text in texts]


def _with_overlays(part: dict[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {key: value for key, value in part.items() if key != "with"}
    yield from (dict(overlay) for name, overlay in part.get("with", {}).items() if name in names)


def _filled(text: str, values: dict[str, Any]) -> str:
    """Replace placeholders. A string that is only a placeholder gets the type of the value."""
    typed = re.sub(f'"{_PLACEHOLDER.pattern}"', lambda match: json.dumps(values[match[1]]), text)
    return _PLACEHOLDER.sub(lambda match: json.dumps(str(values[match[1]]))[1:-1], typed)


def _part(name: str) -> tuple[str, dict[str, Any]]:
    """The kind and the content of a part."""
    if _is_file(name):
        return "file", _read(Path(name))
    for kind in ("evaluation", "methods"):
        if name in parts(kind):
            return kind, _read(parts(kind)[name])
    module, _, short = name.rpartition(":")
    if module:
        found = getattr(import_module(module), short, None)  # importing a module registers its models and data sets
        if isinstance(found, type) and (method := _method(found)):
            return "methods", {"trainer": {"callbacks+": [method]}}
    from lightning_bayes.zoo.create import create_model  # imports torch, and registers this package's models
    from lightning_bayes.zoo.data import DigitsDataModule  # noqa: F401  (registers this package's data sets)
    from lightning_bayes.zoo.registry import DATA, MODELS, import_path

    settings = _read(path) if (path := {**parts("data"), **parts("models")}.get(short)) else {}
    if short in DATA or short in parts("data"):
        registered = {} if short not in DATA else {"data": {"class_path": import_path(DATA[short])}}
        shape = {key: getattr(DATA.get(short), key, None) for key in _SHAPE}
        values = {key: value for key, value in shape.items() if isinstance(value, int)}
        values |= getattr(DATA.get(short), "composed_values", {}) | settings.get("values", {})
        return "data", {**registered, **settings, "values": values}
    if short in MODELS:
        entry = MODELS[short]
        arguments = {key: f"${{{key}}}" for key in _SHAPE if key != "image_size" or key in entry.options}
        network = {"class_path": entry.class_path, "init_args": {**arguments, **entry.arguments}}
    elif name.startswith(_SOURCES):
        arguments = {"name": name, "num_classes": "${num_classes}", "in_channels": "${in_channels}"}
        network = {"class_path": import_path(create_model), "init_args": arguments}
    else:
        raise ConfigError(
            f"{module} registers no model or data set {short!r}, and has no callback or optimizer of this name. Decorate a "
            "model with zoo.register_model."
        )
    return "models", {**settings, "model": {"init_args": {"model": network}}}


def _method(found: type) -> dict[str, Any]:
    """The callback that an optimizer or a callback of the user stands for; empty for other classes."""
    from lightning.pytorch import Callback

    from lightning_bayes.callbacks import OptimizerCallback
    from lightning_bayes.optim import VariationalOptimizer
    from lightning_bayes.zoo.registry import import_path

    if issubclass(found, VariationalOptimizer):
        arguments = {"optimizer": import_path(found), "eval_samples": "${eval_samples}"}
        return {"class_path": import_path(OptimizerCallback), "init_args": arguments}
    return {"class_path": import_path(found)} if issubclass(found, Callback) else {}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8")) or {}
    return content
