"""The summary table, one row per run: method, settings, and metrics under the posterior and at its mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_bayes.report.measures import HEADINGS, OOD_HEADINGS
from lightning_bayes.report.runs import CHECKPOINTS, CONFIG, Run
from lightning_bayes.report.tables import EVALUATIONS, Cell, logged_table

# The metrics of the summary; the tables below it show all metrics.
MEASURES: Final = {
    **{f"test/{key}": HEADINGS[key] for key in ("cls/Acc", "cls/NLL", "cal/ECE", "sc/AURC")},
    "ood/AUROC": f"OOD {OOD_HEADINGS['AUROC']}",
    **{f"test/{key}": HEADINGS[key] for key in ("reg/RMSE", "reg/NLL")},
}
# Heading of a setting → endings of its dotted key in config.yaml; the first ending that matches is used.
_SETTINGS: Final = {
    "data": ("data.class_path",),
    "model": ("model.init_args.model.init_args.name", "model.init_args.model.class_path", "model.class_path"),
    "epochs": ("trainer.max_epochs",),
    "batch": ("data.init_args.batch_size",),
    "lr": ("init_args.optimizer.init_args.lr",),
    "seed": ("seed_everything",),
}
_CALLBACK: Final = re.compile(r"trainer\.callbacks\.(\d+)\.class_path")
_NOT_METHODS: Final = (
    "EvaluationFigures",
    "PredictionWriter",
    "PosteriorDiagnostics",
    "TemperatureScaling",
    "PosteriorScale",
    "RejectorCallback",
    "BatchNormRecalibration",
    "WarmStart",
)


class Row(NamedTuple):
    """One run in the summary."""

    run: Run
    method: str
    settings: str
    config: str | None  # link from the page to the config
    cells: list[tuple[str, Cell, Cell]]  # heading, and the cells of the posterior and its mean


def joined(runs: Sequence[Run]) -> list[Run]:
    """Merge each evaluation into the fit whose checkpoint it evaluated.

    Args:
        runs: Runs of fits and of evaluations.

    Returns:
        The runs. A fit also has the values and figures of its first test; a second test of the same fit stays separate.
    """
    by_folder: dict[Path, Run] = {run.folder.resolve(): run for run in runs}
    for run in runs:
        fit = _fit_of(run, by_folder)
        # A key that both have logged would overwrite one of the values.
        if fit is not None and not fit.last.keys() & run.last.keys() - {"epoch", "step"}:
            merged = fit._replace(last={**fit.last, **run.last}, figures={**fit.figures, **run.figures})
            by_folder[fit.folder.resolve()] = merged
            del by_folder[run.folder.resolve()]
    return list(by_folder.values())


def _fit_of(run: Run, by_folder: Mapping[Path, Run]) -> Run | None:
    checkpoint = run.config.get("ckpt_path")
    if not isinstance(checkpoint, str) or Path(checkpoint).parent.name != CHECKPOINTS:
        return None
    target = Path(checkpoint).parent.parent
    # A relative path starts at the working directory of the evaluation, which is unknown here.
    depth = len(target.parts)
    matches = [folder for folder in by_folder if folder.parts[-depth:] == target.parts or folder == target.resolve()]
    fit = by_folder[matches[0]] if len(matches) == 1 else None
    return None if fit is None or fit.folder == run.folder else fit


def method_of(config: Mapping[str, Any]) -> str:
    """The method that trained a run.

    Args:
        config: Flat config with dotted keys.

    Returns:
        The name and preset of this package's last training callback, otherwise the name of the optimizer; "–" if unknown.

    Example:
        >>> method_of({"trainer.callbacks.0.class_path": "lightning_bayes.VOGNCallback"})
        'VOGN'
    """
    callbacks = [(match[1], str(path)) for key, path in config.items() if (match := _CALLBACK.fullmatch(key))]
    methods = [
        (number, path)
        for number, path in callbacks
        if path.startswith("lightning_bayes.") and not path.endswith(_NOT_METHODS)
    ]
    if methods:
        number, path = methods[-1]
        preset = config.get(f"trainer.callbacks.{number}.init_args.name") if path.endswith(".from_preset") else None
        name = path.removesuffix(".from_preset").rpartition(".")[2].removesuffix("Callback")
        return f"{name} ({preset})" if preset else name
    return next((_short(path) for key, path in config.items() if key.endswith("optimizer.class_path")), "–")


def _short(path: Any) -> str:
    return str(path).rpartition(".")[2]


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The main settings of a run.

    Args:
        config: Flat config with dotted keys.

    Returns:
        Values by heading, without the settings that the config does not contain.

    Example:
        >>> settings_of({"trainer.max_epochs": 5, "data.class_path": "lightning_bayes.zoo.DigitsDataModule"})
        {'data': 'Digits', 'epochs': '5'}
    """
    settings = {}
    for heading, endings in _SETTINGS.items():
        values = [value for ending in endings for key, value in config.items() if f".{key}".endswith(f".{ending}")]
        if values:
            is_class = heading in {"data", "model"}
            settings[heading] = _short(values[0]).removesuffix("DataModule") if is_class else str(values[0])
    return settings


def summary(runs: Sequence[Run], page: Path) -> list[Row]:
    """Build the summary table.

    Args:
        runs: The joined runs.
        page: Path of the page. Links to configs below its folder are relative to it.

    Returns:
        One row per run, with every metric that at least one run has.
    """
    measures = logged_table("Summary", MEASURES, runs).rows
    shared = _shared_settings(runs)  # the page prints them once, above the table
    rows = []
    for index, run in enumerate(runs):
        settings = ", ".join(f"{name} {value}" for name, value in settings_of(run.config).items() if name not in shared)
        position = index * len(EVALUATIONS)
        cells = [(heading, values[position], values[position + 1]) for heading, values in measures]
        rows.append(Row(run, method_of(run.config), settings, _link(run, page), cells))
    return rows


def shared_settings(runs: Sequence[Run]) -> str:
    """The settings that all runs have in common, as text; empty for a single run."""
    return ", ".join(f"{name} {value}" for name, value in _shared_settings(runs).items())


def _shared_settings(runs: Sequence[Run]) -> dict[str, str]:
    if len(runs) == 1:
        return {}
    first, *others = [settings_of(run.config) for run in runs]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _link(run: Run, page: Path) -> str | None:
    if not run.config_text:
        return None
    start, config = page.resolve().parent, (run.folder / CONFIG).resolve()
    return config.relative_to(start).as_posix() if config.is_relative_to(start) else config.as_uri()
