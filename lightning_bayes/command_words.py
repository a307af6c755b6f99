"""The words of a command line that LightningCLI does not know, translated into words that it knows.

    lightning-bayes laplace --config CONFIG --ckpt_path CHECKPOINT      test with a `LaplaceCallback`
    lightning-bayes predict --output FILE --reject_below P              predict with a `PredictionWriter`

``laplace`` first measures the curvature on the training data, and writes the checkpoint with the posterior to
``NAME-laplace.ckpt``. Further options set arguments of the callback, such as ``--trainer.callbacks.structure=diagonal``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.errors import ConfigError

CONFIG_OPTIONS: Final = ("-c", "--config")
KINDS_OF_CHECKPOINT: Final = ("best", "last", "hpc")  # keywords of Lightning, not paths
_LAPLACE: Final = "--trainer.callbacks+=lightning_bayes.LaplaceCallback"
_WRITER: Final = "--trainer.callbacks+=lightning_bayes.callbacks.PredictionWriter"


def split_options(arguments: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Split a command line into some options with their values, and all other words.

    Args:
        arguments: The words of the command line.
        options: The options to find, as ``--option value`` or ``--option=value``.

    Yields:
        The option and its value, empty if it is missing; or the empty string and another word.

    Example:
        >>> list(split_options(["fit", "-c", "a.yaml", "--config=b.yaml", "--help"], CONFIG_OPTIONS))
        [('', 'fit'), ('-c', 'a.yaml'), ('--config', 'b.yaml'), ('', '--help')]
    """
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in options:
            yield "", word
        else:
            yield option, value if equals else next(words, "")


def as_test_under_laplace(arguments: Sequence[str]) -> list[str]:
    """Translate ``laplace`` into ``test`` with a `LaplaceCallback`; other commands are returned unchanged.

    Args:
        arguments: The arguments of the command line, from `with_configs`: each config is a separate word.

    Returns:
        The new arguments. The callback follows the last config, so that later options can set its arguments.

    Raises:
        ConfigError: If ``--ckpt_path`` is missing or is not a path.

    Example:
        >>> as_test_under_laplace(["laplace", "--config", "digits+lenet+adam", "--ckpt_path=last.ckpt"])[3:5]
        ['--trainer.callbacks+=lightning_bayes.LaplaceCallback', '--trainer.callbacks.save_to=last-laplace.ckpt']
    """
    if list(arguments[:1]) != ["laplace"]:
        return list(arguments)
    words = ["test", *arguments[1:]]
    if {"-h", "--help"} & set(words):
        return words
    path = dict(split_options(words, ["--ckpt_path"])).get("--ckpt_path")
    if not path:
        raise ConfigError("laplace needs a trained checkpoint. Pass --ckpt_path with the checkpoint of a fit.")
    if path in KINDS_OF_CHECKPOINT:
        raise ConfigError(
            f"laplace saves its posterior next to the checkpoint, but {path} is not a file. Pass --ckpt_path with a path."
        )
    position = max((i + 2 for i, word in enumerate(words) if word in CONFIG_OPTIONS), default=1)
    output = Path(path).with_name(f"{Path(path).stem}-laplace{Path(path).suffix}")
    return [*words[:position], _LAPLACE, f"--trainer.callbacks.save_to={output}", *words[position:]]


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
    words, settings = [], []
    for option, value in split_options(arguments, ["--output", "--reject_below"]):
        if option and not value:
            raise ConfigError(f"{option} has no value. Pass --output=FILE or --reject_below=PROBABILITY.")
        if option == "--output":
            settings += [f"dirpath={Path(value).parent}", f"filename={Path(value).name}"]
        elif option:
            settings += [f"reject_below={value}"]
        else:
            words.append(value)
    return [*words, _WRITER, *(f"--trainer.callbacks.{setting}" for setting in settings)] if settings else words
