"""Resolve the values of ``--config``: files, recipes, and parts that together form one composition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_bayes.command_words import CONFIG_OPTIONS, split_options
from lightning_bayes.composition import compose, nearest_names, recipes, split_name
from lightning_bayes.errors import ConfigError


def with_configs(arguments: Sequence[str]) -> list[str]:
    """Replace config names by paths and composed configs.

    Args:
        arguments: The arguments of the command line.

    Returns:
        The arguments with a path or a composed config after each ``--config`` or ``-c``. All parts form one composition,
        which replaces the first part, so that later files override it.

    Example:
        >>> [word[:20] for word in with_configs(["fit", "--config", "digits", "-c", "mlp", "--config=vogn", "--help"])]
        ['fit', '--config', '{"seed_everything": ', '--help']
    """
    pairs = list(split_options(arguments, CONFIG_OPTIONS))
    configs = iter(find_configs([value for option, value in pairs if option and value]))
    words: list[str] = []
    for option, value in pairs:
        if not (option and value):
            words.append(option or value)
        elif (config := next(configs)) is not None:
            words += [option, config]
    return words


def find_configs(names: Sequence[str]) -> list[str | None]:
    """Find the configs of one command line.

    Args:
        names: Paths, recipes, single parts, or parts joined by ``+`` (packaged parts also by ``_``), with or without
            ``.yaml``. YAML text and URLs are returned unchanged. A file takes precedence over a recipe, and a recipe over a
            composition.

    Returns:
        A path or text per name. The first part gets the composition of all parts; the other parts get None.

    Example:
        >>> path, text = find_configs(["osawa2019_cifar10_lenet_vogn", "digits+lenet+vogn"])
        >>> Path(path).name, json.loads(text)["trainer"]["max_epochs"]
        ('osawa2019_cifar10_lenet_vogn.yaml', 80)
    """
    configs = [_complete_config(name) for name in names]
    of_parts = [i for i, config in enumerate(configs) if config is None]
    if of_parts:
        parts = [part for i in of_parts for part in _parts_of(names[i])]
        recipe = recipes().get("_".join(parts))
        configs[of_parts[0]] = json.dumps(compose(parts)) if recipe is None else str(recipe)
    return configs


def _complete_config(name: str) -> str | None:
    if "://" in name or "{" in name or "\n" in name or Path(name).is_file():  # text may be too long for a path
        return name
    recipe = recipes().get(_stem(name).replace("+", "_"))
    return None if recipe is None else str(recipe)


def _parts_of(name: str) -> tuple[str, ...]:
    parts = split_name(name) or split_name(_stem(name))
    if not parts:
        raise ConfigError(
            f"There is no config {name}: no file in {Path.cwd()} and no packaged config has this name. {nearest_names(name)}"
        )
    return parts


def _stem(name: str) -> str:
    return name.removesuffix(".yaml")
