"""Generates the page of the callbacks' arguments: type, range, default and purpose, as in the callbacks' docstrings."""

from __future__ import annotations

import typing
from inspect import signature
from types import UnionType
from typing import Any

import lightning_bayes
from lightning_bayes import VariationalCallback
from lightning_bayes.callbacks.fit.fields import help_of
from lightning_bayes.optim.argument_help import ArgumentHelp

HESSIAN = (
    "`'exact'`, `'reparameterised'`",
    "",
    "`'exact'`",
    "Whether BackPACK computes the Hessian, or gradient and noise estimate it",
)
HEADER = "| argument | type | range | default | purpose |\n|---|---|---|---|---|"


def callbacks() -> list[type[VariationalCallback]]:
    """The callbacks with an optimizer, VOGN's first."""
    found = [value for name in lightning_bayes.__all__ if isinstance(value := getattr(lightning_bayes, name), type)]
    concrete = [kind for kind in found if issubclass(kind, VariationalCallback) and kind is not VariationalCallback]
    return sorted(concrete, key=lambda kind: (kind.__name__ != "VOGNCallback", kind.__name__))


def arguments(callback: type[VariationalCallback]) -> dict[str, tuple[str, str, str, str]]:
    """Type, range, default and purpose of each argument, by name; the text is that of the docstrings."""
    stated = signature(callback).parameters
    found = help_of(callback.optimizer_class, callback.field_defaults)
    rows = {name: cells_of(words_of(stated[name].annotation), entry) for name, entry in found.items()}
    return {**rows, **({"hessian": HESSIAN} if "hessian" in stated else {})}


def cells_of(kind: str, found: ArgumentHelp) -> tuple[str, str, str, str]:
    """Type, range, default and purpose as cells of a table."""
    default = found.default if found.default.startswith("None:") else f"`{found.default}`"
    allowed = "" if kind == "bool" or kind.startswith("`") else found.range  # the type says it
    return kind, allowed, default, found.purpose.replace("|", "\\|")


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
