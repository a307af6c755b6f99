"""Files of tensors and plain values that are written whole or not at all, and read whole, without running code from them.

`torch.load` does not look at the checksums that `torch.save` has written: without this check a flipped bit in a weight goes
unnoticed.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from lightning_bayes.errors import BayesError, CheckpointError, PosteriorError


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


def write_whole(path: str | os.PathLike[str], content: Any, noun: str, advice: str) -> None:
    """Write a file beside its place and rename it, so that one that was there before stays whole until then.

    Args:
        path: The file; its folders are created.
        content: For `torch.save`.
        noun: What it is, for the error.
        advice: What to do if it cannot be written.

    Raises:
        CheckpointError: If it cannot be written, such as on a full disk.
    """
    buffer = io.BytesIO()  # torch.save into the file itself would hide the error of a full disk behind its own
    torch.save(content, buffer)
    try:
        _replace(Path(path), buffer)
    except OSError as error:
        raise CheckpointError(
            f"The {noun} {path} could not be written ({error.strerror or error}). A file that was there before is still "
            f"whole. {advice}"
        ) from error


def _replace(path: Path, buffer: io.BytesIO) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # one name, so that a kill leaves one file at most
    try:
        with open(partial, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
