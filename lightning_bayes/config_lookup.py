"""The values of ``--config`` on the command line: files, recipes, and parts that make one composition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.composition import compose, nearest_names, recipes, split_name
from lightning_bayes.errors import ConfigError

_OPTIONS: Final = ("-c", "--config")


def with_configs(arguments: Sequence[str]) -> list[str]:
    """Replace the names of configs.

    Args:
        arguments: The arguments of the command line.

    Returns:
        The arguments with a path or a composed config after each ``--config`` or ``-c``. All parts among them are composed
        in the place of the first, so that files after it override the composition.

    Example:
        >>> [word[:20] for word in with_configs(["fit", "--config", "digits", "-c", "mlp", "--config=vogn", "--help"])]
        ['fit', '--config', '{"seed_everything": ', '--help']
    """
    words: list[str] = []
    places: list[int] = []  # of the configs' names among the words
    for argument in arguments:
        option, equals, value = argument.partition("=")
        is_value = bool(words) and words[-1] in _OPTIONS and len(words) - 1 not in places
        if is_value:
            places.append(len(words))
        if option in _OPTIONS and equals and not is_value:
            places.append(len(words) + 1)
            words += [option, value]
        else:
            words.append(argument)
    found = find_configs([words[place] for place in places])
    dropped = {i for place, config in zip(places, found, strict=True) if config is None for i in (place - 1, place)}
    replaced = dict(zip(places, found, strict=True))
    return [replaced.get(i) or word for i, word in enumerate(words) if i not in dropped]


def find_config(name: str) -> str:
    """Find one config.

    Args:
        name: A path, the name of a recipe, or parts joined by ``+`` (those of this package also by ``_``), with or without
            ``.yaml``. YAML text and URLs stay as they are. A file goes before a recipe, a recipe before parts.

    Returns:
        A path, or the composed config as text.

    Example:
        >>> Path(find_config("osawa2019_cifar10_lenet_vogn")).name
        'osawa2019_cifar10_lenet_vogn.yaml'
        >>> json.loads(find_config("digits+lenet+vogn"))["trainer"]["max_epochs"]
        80
    """
    (found,) = find_configs([name])
    return found or ""


def find_configs(names: Sequence[str]) -> list[str | None]:
    """Find configs that are given together.

    Args:
        names: As for `find_config`; a part may also stand alone.

    Returns:
        A path or text for each name; None where it joins the composition in the place of the first part.
    """
    found = [_whole_config(name) for name in names]
    composed = [i for i, whole in enumerate(found) if whole is None]
    if composed:
        parts = [part for i in composed for part in _parts_of(names[i])]
        recipe = recipes().get("_".join(parts))
        found[composed[0]] = json.dumps(compose(parts)) if recipe is None else str(recipe)
    return found


def _whole_config(name: str) -> str | None:
    if "://" in name or "{" in name or "\n" in name or Path(name).is_file():  # text may be too long for a path
        return name
    recipe = recipes().get(_stem(name).replace("+", "_"))
    return None if recipe is None else str(recipe)


def _parts_of(name: str) -> tuple[str, ...]:
    parts = split_name(name) or split_name(_stem(name))
    if not parts:
        raise ConfigError(
            f"There is no config {name}, neither as a file below {Path.cwd()} nor here. {nearest_names(name)}"
        )
    return parts


def _stem(name: str) -> str:
    return name.removesuffix(".yaml")
