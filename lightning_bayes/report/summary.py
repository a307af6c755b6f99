"""The summary of a report: one row per fit with its tests below it, and a verdict in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_bayes.report.comparison import against_first, change, standard_error
from lightning_bayes.report.runs import CONFIG, Run
from lightning_bayes.report.tables import HEADINGS, OOD_HEADINGS, Cell, config_differences, metric_cells

# The metrics of the summary; the tables below it show all metrics.
MEASURES: Final = {
    **{f"test/{key}": HEADINGS[key] for key in ("cls/Acc", "cls/NLL", "cal/ECE", "cls/MI", "sc/AURC")},
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
    "Calibration",
    "BatchNormRecalibration",
    "WarmStart",
)
_MAX_DIFFERENCES: Final = 4  # that tell apart two fits with the same method and settings
_SMALL_MUTUAL_INFORMATION: Final = 1e-3  # nats


Measured = tuple[str, Cell, Cell, float | None]  # heading, posterior, its mean, standard error of the posterior's value


class Row(NamedTuple):
    """A fit in the summary, or a test below it."""

    run: Run
    method: str
    settings: str
    config: str | None  # link from the page to the config
    cells: list[Measured]
    is_test: bool = False


def method_of(config: Mapping[str, Any]) -> str:
    """The name and preset of this package's last training callback, otherwise the name of the optimizer; "–" if unknown."""
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
    """The main settings in a flat config, by heading."""
    settings = {}
    for heading, endings in _SETTINGS.items():
        values = [value for ending in endings for key, value in config.items() if f".{key}".endswith(f".{ending}")]
        if values:
            is_class = heading in {"data", "model"}
            settings[heading] = _short(values[0]).removesuffix("DataModule") if is_class else str(values[0])
    return settings


def summary(runs: Sequence[Run], page: Path) -> list[Row]:
    """One row per joined run, and one below it for each further test; links to configs are relative to the page."""
    everything = [*runs, *(test.run for run in runs for test in run.tests)]
    logged = {key for run in everything for key in run.last}
    keys = [key for key in MEASURES if {key, key.replace("/", "_mean/", 1)} & logged]
    rows = []
    for run, cells, text in zip(runs, _cells(runs, keys), _distinct_settings(runs), strict=True):
        rows.append(Row(run, method_of(run.config), text, _link(run, page), cells))
        for test in run.tests:
            checkpoint = Path(str(test.run.config.get("ckpt_path"))).name
            text = f"test of {checkpoint}, {test.reason}; not compared"
            rows.append(Row(test.run, "", text, _link(test.run, page), _cells([test.run], keys)[0], True))
    return rows


def _cells(runs: Sequence[Run], keys: Sequence[str]) -> list[list[Measured]]:
    """For each run, the cells of some measures."""
    cells: list[list[Measured]] = [[] for _ in runs]
    for key in keys:
        for of_run, run, (posterior, mean) in zip(cells, runs, metric_cells(key, MEASURES[key], runs), strict=True):
            of_run.append((MEASURES[key], posterior, mean, standard_error(run, key)))
    return cells


def verdict(runs: Sequence[Run]) -> Iterator[str]:
    """Sentences on what the posterior changes in each run, and on what changes from the first run to the others."""
    for run in runs:
        changes = [
            f"{MEASURES[key][:-2]} by {change(run.last[key] - run.last[at_mean], _paired_error(run, key))}"
            for key in ("test/cls/Acc", "test/cls/NLL", "test/cal/ECE", "test/reg/RMSE", "test/reg/NLL")
            if {key, at_mean := key.replace("test/", "test_mean/")} <= run.last.keys()
        ]
        if changes:
            information = run.last.get("test/cls/MI", math.inf)
            remark = " The samples hardly differ from each other." if information < _SMALL_MUTUAL_INFORMATION else ""
            yield f"{run.name}: averaging over the posterior changes {', '.join(changes)}, from its mean.{remark}"
    yield from against_first(runs)


def _paired_error(run: Run, key: str) -> float | None:
    """The standard error of the difference between the samples and the mean on the same examples, if it was logged."""
    return run.last.get(f"{key.replace('test/', 'test_diff/', 1)}_SE")


def shared_settings(runs: Sequence[Run]) -> dict[str, str]:
    """The settings that all runs have in common; empty for a single run."""
    if len(runs) == 1:
        return {}
    first, *others = [settings_of(run.config) for run in runs]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _distinct_settings(runs: Sequence[Run]) -> list[str]:
    """The settings that are not shared; runs that look alike are told apart by other values of their configs."""
    shared = shared_settings(runs)
    texts = [
        [f"{name} {value}" for name, value in settings_of(run.config).items() if name not in shared] for run in runs
    ]
    looks = [(method_of(run.config), *text) for run, text in zip(runs, texts, strict=True)]
    differences = [
        (key, values) for key, values in config_differences(runs) if not key.startswith(("trainer.logger", "seed"))
    ]
    for index, (run, text) in enumerate(zip(runs, texts, strict=True)):
        if looks.count(looks[index]) > 1:
            own = [f"{_short(key)} {values[index]}" for key, values in differences if key in run.config]
            text += own[:_MAX_DIFFERENCES]
    return [", ".join(text) for text in texts]


def _link(run: Run, page: Path) -> str | None:
    if not run.config_text:
        return None
    start, config = page.resolve().parent, (run.folder / CONFIG).resolve()
    return config.relative_to(start).as_posix() if config.is_relative_to(start) else config.as_uri()
