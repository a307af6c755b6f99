"""Files of tensors and plain values: atomic writes, verified checksums, and loading without code execution.

`torch.load` ignores the checksums that `torch.save` writes, so it would not notice a flipped bit in a weight.
"""

from __future__ import annotations

import io
import os
import re
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
    """The wording and type of the error for an unreadable file.

    Attributes:
        noun: The kind of file, with an article.
        error: The exception class.
        advice: The next step for a file of another kind or an incomplete file.
        instead: The next step for a damaged file.
        objects: The next step for a file with objects of types that only code from the file can rebuild.
    """

    noun: str
    error: type[BayesError]
    advice: str
    instead: str
    objects: str = ""


CHECKPOINT: Final = FileKind(
    "a checkpoint",
    PosteriorError,
    "Is the file complete?",
    "Use an earlier checkpoint.",
    "Such objects usually come from save_hyperparameters(). If you trust the file, call torch.serialization."
    "add_safe_globals([...]) with the type, or resume with trainer.fit(..., weights_only=False). For later files, write "
    "save_hyperparameters(ignore=[...]).",
)
_IS_FOLDER: Final = 0x10  # a DOS attribute, which no checksum covers; torch reads such an entry as an empty one
_REFUSED: Final = re.compile(r"Unsupported global: GLOBAL (\S+)")  # in the message of torch.load


def verified_load(
    path: str | os.PathLike[str],
    kind: FileKind = CHECKPOINT,
    map_location: str | torch.device = "cpu",
    parse: Callable[[str | os.PathLike[str]], Any] | None = None,
) -> Any:
    """Verify a file's checksums and load it; other files raise `kind.error`. `parse` reads what `torch.load` does not."""
    verify_checksums(path, kind)
    with named_if_unreadable(path, kind):
        if parse is not None:
            return parse(path)
        with open(path, "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=True)


def atomic_save(path: str | os.PathLike[str], content: Any, noun: str, advice: str) -> None:
    """Save an object in the format of `torch.save`; see `atomic_write`."""
    buffer = io.BytesIO()  # torch.save to a file would hide the error of a full disk behind its own
    torch.save(content, buffer)
    atomic_write(path, buffer.getbuffer(), noun, advice)


def atomic_write(path: str | os.PathLike[str], data: bytes | memoryview, noun: str, advice: str) -> None:
    """Write bytes to a temporary file and rename it; an existing file stays intact until then."""
    try:
        _replace(Path(path), data)
    except OSError as error:
        raise CheckpointError(
            f"The {noun} {path} could not be written ({error.strerror or error}). An existing file is still intact. "
            f"{advice}"
        ) from error


def _replace(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # a fixed name: a killed process leaves at most one file
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def verify_checksums(path: str | os.PathLike[str], kind: FileKind = CHECKPOINT) -> None:
    """Raise `kind.error` if an entry is not what `torch.save` wrote. Files that are not zip archives pass."""
    with named_if_unreadable(path, kind):  # is_zipfile, too, raises for a damaged directory of a zip archive
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            folders = [entry.filename for entry in archive.infolist() if entry.external_attr & _IS_FOLDER]
    if damaged is not None:
        raise kind.error(f"{path} is damaged: the checksum of {damaged} is wrong. {kind.instead}")
    if folders:
        raise kind.error(f"{path} is damaged: {folders[0]} is marked as a folder. {kind.instead}")


@contextmanager
def named_if_unreadable(path: str | os.PathLike[str], kind: FileKind = CHECKPOINT) -> Iterator[None]:
    """Convert a parser's errors, except FileNotFoundError, to `kind.error`, which names the file."""
    try:
        yield
    except (FileNotFoundError, kind.error):
        raise
    except Exception as error:  # parsers raise arbitrary errors for foreign or damaged files
        if kind.objects and (refused := _REFUSED.search(str(error))):
            raise kind.error(
                f"{path} holds an object of the type {refused[1]}, and loading it may run code. {kind.objects}"
            ) from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise kind.error(f"{path} cannot be read as {kind.noun} ({reason}). {kind.advice}") from error
