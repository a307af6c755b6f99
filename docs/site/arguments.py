"""Generates the page of the callbacks' arguments: type, range, default and purpose, as the command line reads them."""

from __future__ import annotations

import re
import typing
from types import UnionType
from typing import Any

from jsonargparse import ArgumentParser

import lightning_bayes
from lightning_bayes import VOGN, VariationalCallback
from lightning_bayes.callbacks.fields import declaration
from lightning_bayes.optim.settings import ANY

HEADER = "| argument | type | range | default | purpose |\n|---|---|---|---|---|"


def callbacks() -> list[type[VariationalCallback]]:
    """The callbacks with an optimizer, VOGN's first."""
    found = [value for name in lightning_bayes.__all__ if isinstance(value := getattr(lightning_bayes, name), type)]
    concrete = [kind for kind in found if issubclass(kind, VariationalCallback) and kind is not VariationalCallback]
    return sorted(concrete, key=lambda kind: (kind.__name__ != "VOGNCallback", kind.__name__))


def arguments(callback: type[VariationalCallback]) -> dict[str, tuple[str, str, str, str]]:
    """Type, range, default and purpose of each argument, by name."""
    parser = ArgumentParser()
    parser.add_class_arguments(callback, "callback")
    kind_of_optimizer = vars(callback).get("optimizer_class")
    optimizer = kind_of_optimizer if isinstance(kind_of_optimizer, type) else VOGN  # VON's depends on an argument
    declared = declaration(optimizer)
    defaults = {**declared.defaults, **optimizer.own_defaults, **callback.field_defaults}
    rows = {}
    for action in parser._actions:
        _, _, name = action.dest.partition(".")
        if name and not name.endswith(".help"):
            text = " ".join((action.help or "").split())
            setting = declared.settings.get(name)
            words = "" if setting is None or setting.range is ANY else setting.range.words
            kind = words_of(getattr(action, "_typehint", None) or action.type)
            rows[name] = (kind, words, default_of(name, kind, text, defaults), purpose_of(text))
    return rows


def words_of(kind: Any) -> str:
    """A type in words, such as ``float or Schedule or None``."""
    if typing.get_origin(kind) is typing.Annotated:
        return words_of(kind.__origin__)
    if typing.get_origin(kind) in {typing.Union, UnionType}:
        return " or ".join(words_of(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value!r}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is not None and "Callable" in str(kind):
        return "Schedule"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def default_of(name: str, kind: str, text: str, defaults: dict[str, Any]) -> str:
    """The default in words: from the help text if None is allowed, else from the declaration."""
    if kind.endswith("None"):
        meaning = re.search(r"None:? (?:selects |counts |uses )?(.+?)(?:[.;]\s|[.;]?$)", text)
        return f"None: {meaning[1]}" if meaning else "None"
    stated = re.search(r"[Dd]efault:? (.+?)(?:[.;]\s|[.;]?$)", text)
    return f"`{defaults[name]!r}`" if name in defaults else stated[1] if stated else ""


def purpose_of(text: str) -> str:
    """The first sentence of a help text."""
    return re.split(r"(?<!al\.)(?<=[.;])\s", text)[0].rstrip(".;").replace("|", "\\|")


def table(rows: dict[str, tuple[str, str, str, str]]) -> str:
    """A Markdown table of arguments."""
    return "\n".join([HEADER, *(f"| `{name}` | {' | '.join(cells)} |" for name, cells in sorted(rows.items()))])


def page() -> str:
    """The page: VOGN's arguments, and what the other callbacks add or change."""
    first, *others = callbacks()
    shared = arguments(first)
    parts = [
        "# Arguments of the callbacks",
        "All arguments are keyword arguments. A Schedule is a function of the number of updates, such as `LinearSchedule`.",
        f"## {first.__name__}, and all others\n\n{table(shared)}",
    ]
    for callback in others:
        own = {name: row for name, row in arguments(callback).items() if row != shared.get(name)}
        if own:
            parts.append(f"## {callback.__name__}\n\n{table(own)}")
    return "\n\n".join(parts) + "\n"
