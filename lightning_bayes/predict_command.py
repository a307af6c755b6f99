"""``lightning-bayes predict --output FILE --reject_below P``: where to write predictions, and which to reject.

The two options become arguments of a `PredictionWriter`, which is added to the callbacks of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.errors import ConfigError

_WRITER: Final = "--trainer.callbacks+=lightning_bayes.callbacks.PredictionWriter"
_OPTIONS: Final = ("--output", "--reject_below")


def with_prediction_writer(arguments: Sequence[str]) -> list[str]:
    """Translate ``--output`` and ``--reject_below`` of ``predict`` into a `PredictionWriter`.

    Args:
        arguments: The arguments of the command line.

    Returns:
        Arguments of LightningCLI with the writer at the end; commands other than ``predict`` are returned unchanged.

    Raises:
        ConfigError: If an option has no value.

    Example:
        >>> with_prediction_writer(["predict", "--output", "out/cats.csv", "--config", "a.yaml"])[1:4]
        ['--config', 'a.yaml', '--trainer.callbacks+=lightning_bayes.callbacks.PredictionWriter']
    """
    if list(arguments[:1]) != ["predict"]:
        return list(arguments)
    words: list[str] = []
    options: dict[str, str] = {}
    remaining = iter(arguments)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            words.append(word)
            continue
        if not equals:
            value = next(remaining, "")
            if not value:
                raise ConfigError(f"{option} has no value. Pass --output=FILE or --reject_below=PROBABILITY.")
        options[option] = value
    return [*words, *_writer(options)] if options else words


def _writer(options: dict[str, str]) -> Iterator[str]:
    yield _WRITER
    if "--output" in options:
        path = Path(options["--output"])
        yield f"--trainer.callbacks.dirpath={path.parent}"
        yield f"--trainer.callbacks.filename={path.name}"
    if "--reject_below" in options:
        yield f"--trainer.callbacks.reject_below={options['--reject_below']}"
