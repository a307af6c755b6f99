"""Posterior files by name: one folder for those that several projects use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "LIGHTNING_BAYES_HOME"  # of the environment: another folder
_ENDING: Final = ".pt"


def posterior_folder() -> Path:
    """Where posterior files are found by name: ``$LIGHTNING_BAYES_HOME``, else ``~/.cache/lightning_bayes``.

    Returns:
        The folder; it need not exist.
    """
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "lightning_bayes")


def find_posterior(path: str | os.PathLike[str]) -> Path:
    """Find a posterior file.

    Args:
        path: A file, or the name of one, with or without ``.pt``, here or in `posterior_folder`; the nearer one is taken.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If there is none; lists the names in the folder.
    """
    places = [Path(path), posterior_folder() / path]
    candidates = [file for place in places for file in (place, place.with_name(place.name + _ENDING))]
    for file in candidates:
        if file.is_file():
            return file
    names = sorted(file.stem for file in posterior_folder().glob(f"*{_ENDING}"))
    raise FileNotFoundError(
        f"There is no posterior file {path}, neither below {Path.cwd()} nor in {posterior_folder()}, which has "
        f"{', '.join(names) or 'none'}. zoo.save_posterior(zoo.posterior_folder() / 'NAME.pt', ...) puts one there; "
        f"{VARIABLE} names another folder."
    )
