"""Files of tensors and plain values: written atomically, verified before they are read, and read without running code.

`torch.load` ignores the checksums that `torch.save` writes, so without this check a flipped bit in a weight goes unnoticed.
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
    """The words for a file that cannot be read.

    Attributes:
        noun: The kind of file, with its article.
        error: The error to raise.
        advice: The next step for a file of another kind or an incomplete one.
        instead: The next step for a damaged file.
    """

    noun: str
    error: type[BayesError]
    advice: str
    instead: str


CHECKPOINT: Final = FileKind("a checkpoint", PosteriorError, "Is the file complete?", "Take an earlier checkpoint.")


def verified_load(
    path: str | os.PathLike[str],
    kind: FileKind = CHECKPOINT,
    map_location: str | torch.device = "cpu",
    parse: Callable[[str | os.PathLike[str]], Any] | None = None,
) -> Any:
    """Verify a file's checksums and read it.

    A damaged file, a pickle and a file of another format raise the error of `kind`; a missing file is a FileNotFoundError.

    Args:
        path: The file.
        kind: The kind of file that is expected.
        map_location: Device of the tensors.
        parse: Reads a format other than that of `torch.save`.

    Returns:
        The contents.
    """
    verify_checksums(path, kind)
    with named_if_unreadable(path, kind):
        if parse is not None:
            return parse(path)
        with open(path, "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=True)


def atomic_save(path: str | os.PathLike[str], content: Any, noun: str, advice: str) -> None:
    """Save by `torch.save` into a temporary file and rename it, so that a previous file stays intact until then.

    Args:
        path: The file; its folders are created.
        content: For `torch.save`.
        noun: The kind of file, for the error.
        advice: The next step, for the error.
    """
    buffer = io.BytesIO()  # torch.save into the file itself would hide the error of a full disk behind its own
    torch.save(content, buffer)
    atomic_write(path, buffer.getbuffer(), noun, advice)


def atomic_write(path: str | os.PathLike[str], data: bytes | memoryview, noun: str, advice: str) -> None:
    """Write bytes into a temporary file and rename it, so that a previous file stays intact until then.

    Args:
        path: The file; its folders are created.
        data: The contents.
        noun: The kind of file, for the error.
        advice: The next step, for the error.

    Raises:
        CheckpointError: If the file cannot be written, such as on a full disk.
    """
    try:
        _replace(Path(path), data)
    except OSError as error:
        raise CheckpointError(
            f"The {noun} {path} could not be written ({error.strerror or error}). A file that was there before is still "
            f"whole. {advice}"
        ) from error


def _replace(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # one name, so that a kill leaves one file at most
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def verify_checksums(path: str | os.PathLike[str], kind: FileKind = CHECKPOINT) -> None:
    """Verify the checksums that `torch.save` wrote.

    Args:
        path: The file; anything but an archive of torch passes.
        kind: The kind of file that is expected; its error is raised for a wrong checksum.
    """
    if not zipfile.is_zipfile(path):
        return
    with named_if_unreadable(path, kind), zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise kind.error(f"{path} is damaged: {damaged} in it has another checksum. {kind.instead}")


@contextmanager
def named_if_unreadable(path: str | os.PathLike[str], kind: FileKind = CHECKPOINT) -> Iterator[None]:
    """Turn any error of a parser into the error of `kind`, which names the file.

    Args:
        path: The file that is read inside.
        kind: The kind of file that is expected.

    Yields:
        Nothing.

    Raises:
        FileNotFoundError: As it is.
    """
    try:
        yield
    except (FileNotFoundError, kind.error):
        raise
    except Exception as error:  # a foreign or damaged file makes the parser fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise kind.error(f"{path} cannot be read as {kind.noun} ({reason}). {kind.advice}") from error
