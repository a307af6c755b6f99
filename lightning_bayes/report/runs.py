"""Reading a run's folder."""

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
    series: dict[str, list[tuple[float, float]]]  # (epoch, or step where no epoch is known; value)
    config: dict[str, Any]  # flat, by dotted keys
    config_text: str
    figures: dict[str, Path]
    checkpoints: list[Path]


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Read runs.

    Args:
        folders: Folders of runs, or of several runs, such as ``runs`` or ``runs/digits_lenet_vogn``.

    Returns:
        The runs, each once, named by the part of their paths that differs.

    Raises:
        RunError: If a folder has no run; lists all such folders.

    Example:
        >>> read_runs(["nowhere"])
        Traceback (most recent call last):
        ...
        lightning_bayes.errors.RunError: There is no run in nowhere: a run is a folder with metrics.csv, ...
    """
    found: dict[Path, Path] = {}  # by resolved path, so each once
    missing = []
    for folder in folders:
        inside = _runs_in(Path(folder))
        found |= {path.resolve(): path for path in inside}
        missing += [] if inside else [str(folder)]
    if missing or not found:
        raise RunError(
            f"There is no run in {', '.join(missing) or 'an empty list'}: a run is a folder with {METRICS}, which "
            "Lightning's CSVLogger writes. Train with one of the packaged configurations, or add a CSVLogger to the trainer."
        )
    return [read_run(folder, name) for folder, name in zip(found.values(), _names(list(found)), strict=True)]


def _runs_in(folder: Path) -> list[Path]:
    if (folder / METRICS).is_file():
        return [folder]
    return sorted((path.parent for path in folder.rglob(METRICS)), key=_by_version)


def _by_version(path: Path) -> tuple[Path, str, int]:
    stem, _, number = path.name.rpartition("_")
    return (path.parent, stem, int(number)) if number.isdigit() else (path.parent, path.name, -1)


def _names(folders: list[Path]) -> list[str]:
    parts = [folder.parts for folder in folders]
    shared = 0
    while len(folders) > 1 and len({each[: shared + 1] for each in parts}) == 1 and shared + 1 < min(map(len, parts)):
        shared += 1  # a run inside another run's folder keeps its last part
    return ["/".join(each[shared:] if len(folders) > 1 else each[-2:]) for each in parts]


def read_run(folder: Path, name: str) -> Run:
    """Read one run.

    Args:
        folder: The folder with ``metrics.csv``.
        name: The run's name.

    Returns:
        The run; fields without a file are empty.
    """
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
    except yaml.YAMLError as error:  # also for tags that would run code
        raise RunError(f"{path} is not plain YAML: {error}. Repair or delete it.") from error
    if not isinstance(settings, dict):
        raise RunError(f"{path} holds {settings!r} instead of settings by name. Repair or delete it.")
    return settings


def _read_series(path: Path) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(_text(path))), start=2):
        values = {key: _number(value, f"{path}, line {number}, {key}") for key, value in row.items() if value}
        x = values.get("epoch", values.get("step", math.nan))
        for key, value in values.items():
            if key not in {"epoch", "step"}:
                series.setdefault(key, []).append((x, value))
    return series


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise RunError(f"{where} is {text!r}, not a number. Remove the line, or the run from the report.") from None


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
