"""The parser of the command line: short messages, the nearest name for a misspelling, no abbreviations.

jsonargparse explains a value that does not parse by all types that it might have had, after two pages of usage. Here the
first cause is printed, and ``--debug`` prints the rest.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, NoReturn, final

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

_MOST_LINES: Final = 4
_CHAFF: Final = re.compile(
    r"Does not validate|Subtypes: |Errors:$|Given value type: |Given value: NestedArg|- Expected a <class 'NoneType'>"
)
_OF_CLASS: Final = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN: Final = re.compile(r"Option '([^']+)' is not accepted|[Uu]nrecognized arguments: (--[^\s=]+)")


@final
class BayesParser(LightningArgumentParser):
    """A parser whose errors take a few lines.

    Args:
        *arguments: Of the parent class.
        is_debugging: Whether errors are whole.
        **options: Of the parent class.
    """

    def __init__(self, *arguments: Any, is_debugging: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self._is_debugging = is_debugging

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the cause and end the process with status 2.

        Args:
            message: The whole explanation.
            ex: The error behind it.
        """
        if self._is_debugging or not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "")
        print(f"{command}: {brief(message, parser.options())}", file=sys.stderr)
        print(f"`{command} --help` lists the arguments; --debug prints the whole message.", file=sys.stderr)
        self.exit(2)

    def options(self) -> list[str]:
        """All options of this parser, such as ``--trainer.max_epochs``."""
        return re.findall(r"--[\w.]+", self.format_usage())


def brief(message: str, options: Iterable[str] = ()) -> str:
    """The first cause of a message of jsonargparse, and the nearest name for an unknown one.

    Args:
        message: The message.
        options: Known options of the command line.

    Returns:
        A few lines.

    Example:
        >>> print(brief("Unrecognized arguments: --trainer.max_epoch=1", ["--trainer.max_epochs"]))
        Unrecognized arguments: --trainer.max_epoch=1
        Did you mean --trainer.max_epochs?
    """
    lines = [line for line in message.splitlines() if line.strip() and not _CHAFF.match(line.strip())]
    problems = [number for number, line in enumerate(lines) if _OF_CLASS.search(line)]
    if len(problems) > 1:  # the others are classes that were not meant
        after = next((n for n in range(problems[1], len(lines)) if lines[n].strip().startswith("Given")), len(lines))
        lines = lines[: problems[1]] + lines[after:]
    return "\n".join([*lines[:_MOST_LINES], *_nearest(lines, options)])


def _nearest(lines: list[str], options: Iterable[str]) -> list[str]:
    text = "\n".join(lines)
    unknown = _UNKNOWN.search(text)
    if unknown is None:
        return []
    owner = _OF_CLASS.search(text)
    known = arguments_of(owner[1]) if owner else list(options)
    close = difflib.get_close_matches(unknown[1] or unknown[2], known, 1)
    return [f"Did you mean {close[0]}?"] if close else []


def arguments_of(class_path: str) -> list[str]:
    """The names of a class's arguments.

    Args:
        class_path: Module and name, such as ``lightning_bayes.VOGNCallback``.

    Returns:
        The names; none where there is no such class.
    """
    module, _, name = class_path.rpartition(".")
    try:
        return list(ArgumentParser().add_class_arguments(getattr(import_module(module), name)))
    except (ImportError, AttributeError, ValueError):
        return []
