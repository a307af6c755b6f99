"""The command-line parser: configs by name, short error messages, suggestions for misspelled names, no abbreviations.

For a value that does not parse, jsonargparse prints two pages of usage and then one error per type that it tried. This
parser prints the first cause; ``--debug`` prints the full message.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, NoReturn, final

from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]  # it is documented
from lightning.pytorch.cli import LightningArgumentParser

from lightning_bayes.cli.composition import configs_of

_MAX_LINES: Final = 4
_NOISE: Final = re.compile(
    r"Does not validate|Subtypes: |Errors:$|Given value type: |Given value: NestedArg|- Expected a <class 'NoneType'>"
)
_WRAPPERS: Final = re.compile(r"^(?:error: )?(?:Parser key \"[^\"]*\":\s*)+")
_CLASS_PROBLEM: Final = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN: Final = re.compile(r"Option '([^']+)' is not accepted|[Uu]nrecognized arguments: (--[^\s=]+)")


@final
class NamedConfigs(ActionConfigFile):
    """``--config``: every config that a name stands for is merged, in order."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Merge the configs."""
        for config in configs_of(values):
            super().__call__(parser, cfg, config, option_string)  # type: ignore[no-untyped-call]


@final
class BayesParser(LightningArgumentParser):
    """A LightningCLI parser with error messages of a few lines; in full with `is_debugging`."""

    def __init__(self, *arguments: Any, is_debugging: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self._is_debugging = is_debugging

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the cause of an error and exit with status 2."""
        if self._is_debugging or not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "")
        print(f"{command}: {brief(message, parser.options())}", file=sys.stderr)
        print(f"`{command} --help` lists the arguments; --debug prints the full message.", file=sys.stderr)
        self.exit(2)

    def options(self) -> list[str]:
        """All options of this parser, such as ``--trainer.max_epochs``."""
        return re.findall(r"--[\w.]+", self.format_usage())


def brief(message: str, options: Iterable[str] = ()) -> str:
    """The first cause in an error message of jsonargparse, in at most five lines, with a suggestion for an unknown name."""
    lines = [_WRAPPERS.sub("", line.strip()) for line in message.splitlines() if not _NOISE.match(line.strip())]
    lines = [line for line in lines if line]
    problems = [number for number, line in enumerate(lines) if _CLASS_PROBLEM.search(line)]
    while problems[1:] and problems[1] == problems[0] + 1:  # an argument of the first class has the problem
        lines = lines[problems[1] :]
        problems = [number - problems[1] for number in problems[1:]]
    if len(problems) > 1:  # the user meant the first class; jsonargparse tried the others too
        second, end = problems[1], len(lines)
        given_value = next((i for i in range(second, end) if lines[i].startswith("Given")), end)
        lines = lines[:second] + lines[given_value:]
    return "\n".join([*lines[:_MAX_LINES], *_nearest(lines, options)])


def _nearest(lines: list[str], options: Iterable[str]) -> list[str]:
    text = "\n".join(lines)
    unknown = _UNKNOWN.search(text)
    if unknown is None:
        return []
    class_problem = _CLASS_PROBLEM.search(text)
    candidates = _arguments_of(class_problem[1]) if class_problem else list(options)
    close = difflib.get_close_matches(unknown[1] or unknown[2], candidates, 1)
    if not close and class_problem and candidates:
        return [f"Its arguments are: {', '.join(candidates)}."]
    return [f"Did you mean {close[0]}?"] if close else []


def _arguments_of(class_path: str) -> list[str]:
    """The argument names of a class such as ``lightning_bayes.VOGNCallback``; empty if it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        return list(ArgumentParser().add_class_arguments(getattr(import_module(module), name)))
    except (ImportError, AttributeError, ValueError):
        return []
