"""Help for declared arguments: one line each with range and default, for docstrings and for the page of arguments.

The text of an argument stands once, under ``Attributes:`` in the typed dictionary that declares it (`optim.settings`).
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

from lightning_bayes.optim.settings import ANY, declaration_of

_TITLE = "Keyword arguments, with range and default:"
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<!al\.)(?<=\.)\s+(?![^()]*\))")  # not inside parentheses


class ArgumentHelp(NamedTuple):
    """What a reader needs to know about one argument."""

    purpose: str  # the first sentence of its text; empty without one
    range: str  # in words; empty for any value
    default: str  # in words


def argument_help(*dictionaries: type, defaults: Mapping[str, Any]) -> dict[str, ArgumentHelp]:
    """The help of the arguments that typed dictionaries declare; the text of a later dictionary comes first."""
    declared = declaration_of(*dictionaries)
    texts = dict.fromkeys(declared.settings, "")  # a user's own dictionary may describe none
    texts |= {name: text for dictionary in dictionaries for name, text in _texts(dictionary).items()}
    values = {**declared.defaults, **defaults}
    return {
        name: ArgumentHelp(_purpose(texts[name]), _range(setting.range, kind), _default(texts[name], values[name]))
        for (name, setting), kind in zip(declared.settings.items(), declared.types.values(), strict=True)
    }


def with_arguments(text: str | None, arguments: Mapping[str, ArgumentHelp]) -> str:
    """A docstring followed by a list of arguments, in alphabetical order."""
    listed = [_entry(name, arguments[name]) for name in sorted(arguments)]
    return "\n".join([*([inspect.cleandoc(text), ""] if text else []), _TITLE, *listed, ""])


@cache  # classes share most of their arguments
def _entry(name: str, found: ArgumentHelp) -> str:
    details = f"{found.range}; default {found.default}" if found.range else f"default {found.default}"
    line = " ".join(filter(None, [f"{name}:", found.purpose, f"({details})."])).replace("``", "")
    return textwrap.fill(line, 112, initial_indent="    ", subsequent_indent=" " * 8)


@cache
def _texts(dictionary: type) -> dict[str, str]:
    """Help texts by name of argument."""
    section = inspect.cleandoc(dictionary.__doc__ or "").partition("Attributes:\n")[2]
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}


@cache
def _purpose(text: str) -> str:
    """The first sentence, or its first part."""
    return re.split(r";\s", _SENTENCE_END.split(text)[0])[0].rstrip(".")


def _range(allowed: Any, kind: Any) -> str:
    if allowed is not ANY:
        return str(allowed.words)
    if kind is bool:
        return "True or False"
    return " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else ""


def _default(text: str, value: Any) -> str:
    """The default; for None, what the text says that it means."""
    if value is not None:
        return repr(value)
    sentences = _SENTENCE_END.split(text)
    meaning = next((s for s in sentences if s.startswith("None")), "").rstrip(".")
    return meaning or "None"
