"""Read the files of runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_bayes.errors import RunError

METRICS, CONFIG, FIGURES, CHECKPOINTS = "metrics.csv", "config.yaml", "figures", "checkpoints"


class Run(NamedTuple):
    """The files of one run."""

    name: str
    folder: Path
    last: dict[str, float]  # the last value of each metric
    series: dict[str, list[tuple[float, float]]]  # (epoch, or step if no epoch is logged; value)
    config: dict[str, Any]  # flat, with dotted keys
    config_text: str
    figures: dict[str, Path]
    checkpoints: list[Path]


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Read all runs in the given folders.

    Args:
        folders: Folders of runs, or folders that contain runs, such as ``runs`` or ``runs/digits_lenet_vogn``.

    Returns:
        The runs without duplicates. Their names are the parts in which their paths differ.

    Raises:
        RunError: If a folder contains no run; the message lists all such folders.

    Example:
        >>> read_runs(["nowhere"])
        Traceback (most recent call last):
        ...
        lightning_bayes.errors.RunError: There is no run in nowhere: a run is a folder with metrics.csv, ...
    """
    run_folders: dict[Path, Path] = {}  # resolved path → path as given
    missing = []
    for folder in folders:
        runs_inside = _runs_in(Path(folder))
        run_folders |= {path.resolve(): path for path in runs_inside}
        if not runs_inside:
            missing.append(str(folder))
    if missing or not run_folders:
        raise RunError(
            f"There is no run in {', '.join(missing) or 'an empty list'}: a run is a folder with {METRICS}, which "
            "Lightning's CSVLogger writes. Train with a packaged config, or add a CSVLogger to the trainer."
        )
    names = _names(list(run_folders))
    return [read_run(folder, name) for folder, name in zip(run_folders.values(), names, strict=True)]


def _runs_in(folder: Path) -> list[Path]:
    if (folder / METRICS).is_file():
        return [folder]
    return sorted((path.parent for path in folder.rglob(METRICS)), key=_by_version)


def _by_version(path: Path) -> tuple[Path, str, int]:
    stem, _, number = path.name.rpartition("_")
    return (path.parent, stem, int(number)) if number.isdigit() else (path.parent, path.name, -1)


def _names(folders: list[Path]) -> list[str]:
    """Paths without their common parents; of a single run, the last two parts."""
    if len(folders) == 1:
        return ["/".join(folders[0].parts[-2:])]
    paths = [folder.parts for folder in folders]
    shared = 0
    # Stop before the last part of the shortest path: a run can contain the folder of another run.
    while shared + 1 < min(map(len, paths)) and len({path[: shared + 1] for path in paths}) == 1:
        shared += 1
    return ["/".join(path[shared:]) for path in paths]


def read_run(folder: Path, name: str) -> Run:
    """Read one run from the folder of its ``metrics.csv``; fields of missing files are empty."""
    series = _read_series(folder / METRICS)
    text = _text(folder / CONFIG) if (folder / CONFIG).is_file() else ""
    return Run(
        name=name,
        folder=folder,
        last={key: points[-1][1] for key, points in series.items()},
        series=series,
        config=dict(_flat(_settings(text, folder / CONFIG))),
        config_text=text,
        figures={path.stem: path for path in sorted((folder / FIGURES).glob("*.png"))},
        checkpoints=sorted((folder / CHECKPOINTS).glob("*.ckpt")),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}. Repair it, or leave its run out of the report.") from error


def _settings(text: str, path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:  # safe_load also rejects tags that would run code
        raise RunError(f"{path} is not plain YAML: {error}. Repair or delete it.") from error
    if not isinstance(settings, dict):
        raise RunError(f"{path} contains {settings!r} instead of a mapping of settings. Repair or delete it.")
    return settings


def _read_series(path: Path) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for line, row in enumerate(csv.DictReader(io.StringIO(_text(path))), start=2):
        values = {key: _number(value, f"{path}, line {line}, {key}") for key, value in row.items() if value}
        x = values.get("epoch", values.get("step", math.nan))
        for key, value in values.items():
            if key not in {"epoch", "step"}:
                series.setdefault(key, []).append((x, value))
    return series


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise RunError(
            f"{where} is {text!r}, not a number. Delete the line, or leave the run out of the report."
        ) from None


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
