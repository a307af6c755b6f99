"""``lightning-bayes laplace --config CONFIG --ckpt_path CHECKPOINT``: add a Laplace posterior to a trained checkpoint.

The command is ``lightning-bayes test`` with a `LaplaceCallback`, which first measures the curvature on the training data. It
writes the checkpoint with the posterior to ``NAME-laplace.ckpt``. Further options set arguments of the callback, such as
``--trainer.callbacks.structure=diagonal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightning_bayes.errors import ConfigError

COMMAND: Final = "laplace"
_CALLBACK: Final = "--trainer.callbacks+=lightning_bayes.LaplaceCallback"
_CONFIGS: Final = ("-c", "--config")
KINDS_OF_CHECKPOINT: Final = ("best", "last", "hpc")  # keywords of Lightning, not paths


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
    if not arguments or arguments[0] != COMMAND:
        return list(arguments)
    words = ["test", *arguments[1:]]
    if {"-h", "--help"} & set(words):
        return words
    path = _value(words, "--ckpt_path")
    if path is None:
        raise ConfigError("laplace needs a trained checkpoint. Pass --ckpt_path with the checkpoint of a fit.")
    if path in KINDS_OF_CHECKPOINT:
        raise ConfigError(
            f"laplace saves its posterior next to the checkpoint, but {path} is not a file. Pass --ckpt_path with a path."
        )
    position = max((i + 2 for i, word in enumerate(words) if word in _CONFIGS), default=1)
    output = Path(path).with_name(f"{Path(path).stem}-laplace{Path(path).suffix}")
    return [*words[:position], _CALLBACK, f"--trainer.callbacks.save_to={output}", *words[position:]]


def _value(words: Sequence[str], option: str) -> str | None:
    for i, word in enumerate(words):
        if word == option and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
