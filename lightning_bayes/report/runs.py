"""Read the files of runs, and put tests under the fits whose checkpoints they evaluated."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from lightning_bayes.errors import RunError

METRICS, CONFIG, FIGURES, SCORES, CHECKPOINTS = "metrics.csv", "config.yaml", "figures", "scores.csv", "checkpoints"


# Settings that may differ between a fit and its test: where the data lie, what else is tested, how weights were found.
_FREE: Final = {
    *("root", "download", "batch_size", "num_workers", "predict_dir", "ood", "ood_root", "eval_ood", "corruptions"),
    *("severities", "optimizer", "lr_scheduler", "pretrained", "dirpath", "save_to"),
}
_OF_FOLDERS: Final = (
    "trainer.logger",
    "trainer.callbacks",
    "ckpt_path",
)  # settings that do not describe a run in words
_SHORT: Final = 24  # characters of a setting in a run's name
_VERSION: Final = re.compile(r"/?version_\d+$")
_NUMBERED: Final = re.compile(r"^trainer\.callbacks\.\d+\.")


class Test(NamedTuple):
    """A test of a fit that is listed under it, and not compared with other fits."""

    run: Run
    reason: str  # settings that differ from the fit's, or that the test was repeated


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
    scores: Path | None = None  # of each test example
    tests: tuple[Test, ...] = ()  # further tests of this fit's checkpoints


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """All runs in the given folders, once each. Their names are the parts in which their paths differ."""
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
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [folder.relative_to(shared).as_posix() for folder in folders]


def read_run(folder: Path, name: str) -> Run:
    """Read one run from the folder of its ``metrics.csv``; what a missing file would tell is empty."""
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
        scores=next((folder / FIGURES).glob(SCORES), None),
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
        if isinstance(inner, (dict, list, tuple)) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def changed_settings(fit: Mapping[str, Any], test: Mapping[str, Any], callbacks: bool = False) -> list[str]:
    """The settings of model and data, one phrase each, that a test does not share with its fit."""
    before, after = dict(_flat(dict(fit))), dict(_flat(dict(test)))
    keys = [key for key in dict.fromkeys([*before, *after]) if key.startswith(("model.", "data."))]
    if callbacks:  # whose arguments matter, such as the number of samples; a test may add callbacks
        keys += [key for key in before if key in after and key.startswith("trainer.callbacks.")]
    return [
        f"{_NUMBERED.sub('', key.replace('init_args.', ''))} is {after.get(key)} instead of {before.get(key)}"
        for key in keys
        if before.get(key) != after.get(key) and not _FREE & set(key.split("."))
    ]


def joined(runs: Sequence[Run]) -> list[Run]:
    """Put each test under the fit whose checkpoint it evaluated."""
    by_folder = {run.folder.resolve(): run for run in runs}
    tests: dict[Path, list[Run]] = {}
    for run in runs:
        fit = _fit_of(run, by_folder)
        if fit is not None:
            tests.setdefault(fit, []).append(run)
    of_fits = {run.folder for below in tests.values() for run in below}
    return [_with_tests(run, tests.get(folder, [])) for folder, run in by_folder.items() if run.folder not in of_fits]


def named(runs: Sequence[Run]) -> list[Run]:
    """The runs under the names of their folders without ``version_0``; runs of one folder are told apart by a setting."""
    stems = [_VERSION.sub("", run.name) or run.folder.parent.name for run in runs]
    names: list[str] = [""] * len(runs)
    for stem in dict.fromkeys(stems):
        places = [index for index, other in enumerate(stems) if other == stem]
        for index, name in zip(places, _told_apart(stem, [runs[index] for index in places]), strict=True):
            names[index] = name
    return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]


def _told_apart(stem: str, runs: Sequence[Run]) -> list[str]:
    """The names of runs of one folder, by the first setting that differs in each; their own names if there is none."""
    if len(runs) == 1:
        return [stem]
    keys = dict.fromkeys(["seed_everything", *(key for run in runs for key in run.config)])
    for key in (key for key in keys if not key.startswith(_OF_FOLDERS)):
        values = [str(run.config.get(key, "default")) for run in runs]
        if len(set(values)) == len(runs) and max(map(len, values)) <= _SHORT:
            return [f"{stem}, {key.rpartition('.')[2].removesuffix('_everything')} {value}" for value in values]
    return [run.name for run in runs]


def _with_tests(fit: Run, tests: Sequence[Run]) -> Run:
    """The fit with the results of its last test with the same settings; the other tests stand below it."""
    changes = [(test, "; ".join(changed_settings(fit.config, test.config, callbacks=True))) for test in tests]
    own = [test for test, change in changes if not change and not fit.last.keys() & test.last.keys()]
    counted = own[-1] if own else fit
    return fit._replace(
        last={**fit.last, **counted.last},
        figures={**fit.figures, **counted.figures},
        scores=counted.scores or fit.scores,
        tests=tuple(Test(test, change or "repeated") for test, change in changes if test is not counted),
    )


def _fit_of(run: Run, by_folder: Mapping[Path, Run]) -> Path | None:
    """The folder of the fit that saved the checkpoint of an evaluation, if it is among the runs."""
    checkpoint = run.config.get("ckpt_path")
    is_evaluation = not run.checkpoints and "train/loss" not in run.last  # a fit that was continued is a run of its own
    if not isinstance(checkpoint, str) or Path(checkpoint).parent.name != CHECKPOINTS or not is_evaluation:
        return None
    target = Path(checkpoint).parent.parent
    # A relative path starts at the working directory of the evaluation, which is unknown here.
    depth = len(target.parts)
    matches = [folder for folder in by_folder if folder.parts[-depth:] == target.parts or folder == target.resolve()]
    return matches[0] if len(matches) == 1 and matches[0] != run.folder.resolve() else None
