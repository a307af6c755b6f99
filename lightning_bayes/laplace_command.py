"""``lightning-bayes laplace --config CONFIG --ckpt_path CHECKPOINT``: a posterior for a checkpoint that has none.

It is ``lightning-bayes test`` with a `LaplaceCallback`, which measures the curvature on the training data first and writes
the checkpoint again with the posterior, as ``NAME-laplace.ckpt``. Arguments of the callback follow as
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
KINDS_OF_CHECKPOINT: Final = ("best", "last", "hpc")  # Lightning's words


def as_test_under_laplace(arguments: Sequence[str]) -> list[str]:
    """Translate the command.

    Args:
        arguments: The arguments of the command line, with composed configs.

    Returns:
        Those of ``test``, with the callback behind the last config, so that later arguments can change it; any other command
        as it is.

    Raises:
        ConfigError: If there is no checkpoint.

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
        raise ConfigError(
            "laplace approximates the posterior of trained weights, but there is no checkpoint. Pass --ckpt_path with the "
            "checkpoint of a fit."
        )
    if path in KINDS_OF_CHECKPOINT:
        raise ConfigError(
            f"laplace writes its posterior beside the checkpoint, but {path} is not a file. Pass --ckpt_path with its path."
        )
    behind = max((i + 2 if word in _CONFIGS else i + 1 for i, word in enumerate(words) if _is_config(word)), default=1)
    saved = Path(path).with_name(f"{Path(path).stem}-laplace{Path(path).suffix}")
    return [*words[:behind], _CALLBACK, f"--trainer.callbacks.save_to={saved}", *words[behind:]]


def _is_config(word: str) -> bool:
    return word in _CONFIGS or word.startswith("--config=")


def _value(words: Sequence[str], option: str) -> str | None:
    for i, word in enumerate(words):
        if word == option and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
