"""``lightning-bayes predict --output FILE --reject_below P``: where predictions go, in which format, and which are rejected.

The two options stand for a `PredictionWriter`, which joins the callbacks of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.errors import ConfigError

_WRITER: Final = "--trainer.callbacks+=lightning_bayes.callbacks.PredictionWriter"
_OPTIONS: Final = ("--output", "--reject_below")


def with_prediction_writer(arguments: Sequence[str]) -> list[str]:
    """Translate the options of ``predict``.

    Args:
        arguments: The arguments of the command line.

    Returns:
        Those of LightningCLI, with the writer at the end; any other command as it is.

    Raises:
        ConfigError: If an option has no value.

    Example:
        >>> with_prediction_writer(["predict", "--output", "out/cats.csv", "--config", "a.yaml"])[1:4]
        ['--config', 'a.yaml', '--trainer.callbacks+=lightning_bayes.callbacks.PredictionWriter']
    """
    if list(arguments[:1]) != ["predict"]:
        return list(arguments)
    words: list[str] = []
    found: dict[str, str] = {}
    each = iter(arguments)
    for word in each:
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            words.append(word)
        elif equals or (value := next(each, "")):
            found[option] = value
        else:
            raise ConfigError(f"{option} has no value. Pass a file after --output, a probability after --reject_below.")
    return [*words, *_writer(found)] if found else words


def _writer(options: dict[str, str]) -> Iterator[str]:
    yield _WRITER
    if "--output" in options:
        path = Path(options["--output"])
        yield f"--trainer.callbacks.dirpath={path.parent}"
        yield f"--trainer.callbacks.filename={path.name}"
    if "--reject_below" in options:
        yield f"--trainer.callbacks.reject_below={options['--reject_below']}"
