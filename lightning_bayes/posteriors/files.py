"""Files of tensors and plain values that are read whole, without running code from them, or refused by name.

`torch.load` does not look at the checksums that `torch.save` has written: without this check a flipped bit in a weight goes
unnoticed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from lightning_bayes.errors import BayesError, PosteriorError


@final
@dataclass(frozen=True)
class FileKind:
    """How to speak of a file that cannot be read.

    Attributes:
        noun: What it should be, with its article.
        error: Raised if it is not.
        advice: What to do about a file that is foreign or incomplete.
        instead: What to do about a damaged one.
    """

    noun: str
    error: type[BayesError]
    advice: str
    instead: str


CHECKPOINT: Final = FileKind("a checkpoint", PosteriorError, "Is the file complete?", "Take an earlier checkpoint.")


def read_whole(
    path: str | os.PathLike[str],
    kind: FileKind = CHECKPOINT,
    map_location: str | torch.device = "cpu",
    parse: Callable[[str | os.PathLike[str]], Any] | None = None,
) -> Any:
    """Read a file after its checksums were verified.

    Args:
        path: The file.
        kind: What it should be.
        map_location: Device of the tensors.
        parse: Reads another format than that of `torch.save`.

    Returns:
        Its contents. One that is damaged, foreign or a pickle is an error of `kind`, a missing one a FileNotFoundError.
    """
    check_whole(path, kind)
    with named_if_unreadable(path, kind):
        if parse is not None:
            return parse(path)
        with open(path, "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=True)


def check_whole(path: str | os.PathLike[str], kind: FileKind = CHECKPOINT) -> None:
    """Verify the checksums that `torch.save` has written.

    Args:
        path: A file; one that is no archive of torch passes.
        kind: What it should be, whose error is raised for a wrong checksum.
    """
    if not zipfile.is_zipfile(path):
        return
    with named_if_unreadable(path, kind), zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise kind.error(f"{path} is damaged: {damaged} in it has another checksum. {kind.instead}")


@contextmanager
def named_if_unreadable(path: str | os.PathLike[str], kind: FileKind = CHECKPOINT) -> Iterator[None]:
    """Turn whatever a parser raises into an error of `kind` that names the file.

    Args:
        path: The file that is read inside.
        kind: What it should be.

    Yields:
        Nothing.

    Raises:
        FileNotFoundError: As it is.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # a foreign or damaged file makes the parser fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise kind.error(f"{path} cannot be read as {kind.noun} ({reason}). {kind.advice}") from error
