"""Posterior files by name, in one folder shared by all projects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "LIGHTNING_BAYES_HOME"  # environment variable that overrides the folder
_SUFFIXES: Final = (".safetensors", ".pt")  # .pt for files of format version 1


def posterior_folder() -> Path:
    """The folder of named posterior files: ``$LIGHTNING_BAYES_HOME``, or else ``~/.cache/lightning_bayes``.

    Returns:
        The folder, which may not exist yet.
    """
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "lightning_bayes")


def find_posterior(path: str | os.PathLike[str]) -> Path:
    """Find a posterior file.

    Args:
        path: A file, with or without the suffix ``.safetensors`` or ``.pt``. The working directory is searched first, then
            `posterior_folder`.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If the file does not exist; lists the names in the folder.
    """
    for base in (Path(path), posterior_folder() / path):
        for suffix in ("", *_SUFFIXES):
            file = base.with_name(base.name + suffix)
            if file.is_file():
                return file
    names = sorted({file.stem for suffix in _SUFFIXES for file in posterior_folder().glob(f"*{suffix}")})
    raise FileNotFoundError(
        f"There is no posterior file {path} in {Path.cwd()} or in {posterior_folder()}, which contains "
        f"{', '.join(names) or 'none'}. Save one there with zoo.save_posterior(zoo.posterior_folder() / 'NAME.safetensors', "
        f"...), or set {VARIABLE} to use another folder."
    )
