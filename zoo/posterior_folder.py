"""Posterior files by name, in one folder for several projects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "LIGHTNING_BAYES_HOME"  # of the environment: another folder
_ENDINGS: Final = (".safetensors", ".pt")  # the second one of files before version 2


def posterior_folder() -> Path:
    """Return the folder of named posterior files: ``$LIGHTNING_BAYES_HOME``, else ``~/.cache/lightning_bayes``.

    Returns:
        The folder; it need not exist.
    """
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "lightning_bayes")


def find_posterior(path: str | os.PathLike[str]) -> Path:
    """Find a posterior file.

    Args:
        path: A file or its name without ``.safetensors`` or ``.pt``, in the working directory or in `posterior_folder`; the
            working directory comes first.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If there is none; lists the names in the folder.
    """
    places = [Path(path), posterior_folder() / path]
    candidates = [file for place in places for file in _with_endings(place)]
    for file in candidates:
        if file.is_file():
            return file
    names = sorted({file.stem for ending in _ENDINGS for file in posterior_folder().glob(f"*{ending}")})
    raise FileNotFoundError(
        f"There is no posterior file {path}, neither below {Path.cwd()} nor in {posterior_folder()}, which has "
        f"{', '.join(names) or 'none'}. zoo.save_posterior(zoo.posterior_folder() / 'NAME.safetensors', ...) puts one "
        f"there; {VARIABLE} names another folder."
    )


def _with_endings(place: Path) -> list[Path]:
    return [place, *(place.with_name(place.name + ending) for ending in _ENDINGS)]
