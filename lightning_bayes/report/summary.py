"""One row a run: its method, its settings, and its two evaluations, under the posterior and at the posterior mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_bayes.report.measures import HEADINGS, OOD_HEADINGS, shown, unique_best
from lightning_bayes.report.runs import CHECKPOINTS, CONFIG, Run

# The measures of the summary; the tables have all.
MEASURES: Final = {
    **{key: HEADINGS[key] for key in ("cls/Acc", "cls/NLL", "cal/ECE", "sc/AURC")},
    "ood/AUROC": f"OOD {OOD_HEADINGS['AUROC']}",
    **{key: HEADINGS[key] for key in ("reg/RMSE", "reg/NLL")},
}
# Heading of a setting → the end of its dotted keys in config.yaml, the first that is there.
_SETTINGS: Final = {
    "data": ("data.class_path",),
    "model": ("model.init_args.model.init_args.name", "model.init_args.model.class_path", "model.class_path"),
    "epochs": ("trainer.max_epochs",),
    "batch": ("data.init_args.batch_size",),
    "lr": ("init_args.optimizer.init_args.lr",),
    "seed": ("seed_everything",),
}
_CALLBACK: Final = re.compile(r"trainer\.callbacks\.(\d+)\.class_path")
_OTHERS: Final = (
    "EvaluationFigures",
    "PredictionWriter",
    "PosteriorDiagnostics",
    "TemperatureScaling",
    "PosteriorScale",
    "RejectorCallback",
    "BatchNormRecalibration",
    "WarmStart",
)


class Cell(NamedTuple):
    """A value, by both evaluations."""

    heading: str
    posterior: str
    mean: str
    best: tuple[bool, bool]  # whether each is better than the same evaluation of every other run
    is_point: bool  # whether the run has one evaluation only, such as Adam's


class Row(NamedTuple):
    """A run of the summary."""

    run: Run
    method: str
    settings: str
    config: str | None  # where the config is, from the page
    cells: list[Cell]


def joined(runs: Sequence[Run]) -> list[Run]:
    """Join each evaluation to the fit whose checkpoint it has read.

    Args:
        runs: Runs of fits and of evaluations.

    Returns:
        The runs; a fit has the values and figures of its first test too. A second test of the same fit stays a run.
    """
    found: dict[Path, Run] = {run.folder.resolve(): run for run in runs}
    for run in runs:
        owner = _owner(run, found)
        # Equal keys would hide one of the two.
        if owner is not None and not owner.last.keys() & run.last.keys() - {"epoch", "step"}:
            figures = {**owner.figures, **run.figures}
            both = owner._replace(last={**owner.last, **run.last}, figures=figures)
            found[owner.folder.resolve()] = both
            del found[run.folder.resolve()]
    return list(found.values())


def _owner(run: Run, runs: Mapping[Path, Run]) -> Run | None:
    path = run.config.get("ckpt_path")
    if not isinstance(path, str) or Path(path).parent.name != CHECKPOINTS:
        return None
    wanted = Path(path).parent.parent
    # The path is relative to where the command ran, which the page does not know.
    close = [place for place in runs if place.parts[-len(wanted.parts) :] == wanted.parts or place == wanted.resolve()]
    owner = runs[close[0]] if len(close) == 1 else None
    return None if owner is None or owner.folder == run.folder else owner


def method_of(config: Mapping[str, Any]) -> str:
    """The method that trained a run.

    Args:
        config: Flat, by dotted keys.

    Returns:
        The name of the last callback of this package that trains, with its preset, else that of the optimizer; "–" where
        the config does not tell.

    Example:
        >>> method_of({"trainer.callbacks.0.class_path": "lightning_bayes.VOGNCallback"})
        'VOGN'
    """
    entries = [(match[1], str(path)) for key, path in config.items() if (match := _CALLBACK.fullmatch(key))]
    ours = [(i, path) for i, path in entries if path.startswith("lightning_bayes.") and not path.endswith(_OTHERS)]
    if ours:
        number, path = ours[-1]
        preset = config.get(f"trainer.callbacks.{number}.init_args.name") if path.endswith(".from_preset") else None
        name = path.removesuffix(".from_preset").rpartition(".")[2].removesuffix("Callback")
        return f"{name} ({preset})" if preset else name
    return next((_short(path) for key, path in config.items() if key.endswith("optimizer.class_path")), "–")


def _short(path: Any) -> str:
    return str(path).rpartition(".")[2]


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings that readers ask for first.

    Args:
        config: Flat, by dotted keys.

    Returns:
        Values by heading; those that the config does not have are left out.

    Example:
        >>> settings_of({"trainer.max_epochs": 5, "data.class_path": "lightning_bayes.zoo.DigitsDataModule"})
        {'data': 'Digits', 'epochs': '5'}
    """
    found = {}
    for heading, ends in _SETTINGS.items():
        values = [value for end in ends for key, value in config.items() if f".{key}".endswith(f".{end}")]
        if values:
            is_class = heading in {"data", "model"}
            found[heading] = _short(values[0]).removesuffix("DataModule") if is_class else str(values[0])
    return found


def summary(runs: Sequence[Run], page: Path) -> list[Row]:
    """Build the first table.

    Args:
        runs: The runs, joined.
        page: Where the page will be, for links.

    Returns:
        A row for each run, with the measures that any of them has.
    """
    used = [key for key in MEASURES if any(value is not None for run in runs for value in _both(run, key))]
    columns = [list(_cells(runs, key)) for key in used]
    known = [settings_of(run.config) for run in runs]
    shared = {name for each in known for name in each if len({other.get(name) for other in known}) == 1}
    shown = set() if len(runs) == 1 else shared  # what all runs share is said once, above the table
    return [
        Row(
            run,
            method_of(run.config),
            ", ".join(f"{name} {value}" for name, value in known[number].items() if name not in shown),
            _link(run, page),
            [column[number] for column in columns],
        )
        for number, run in enumerate(runs)
    ]


def shared_settings(runs: Sequence[Run]) -> str:
    """The settings that all of several runs have.

    Args:
        runs: The runs, joined.

    Returns:
        Text; empty for one run.
    """
    known = [settings_of(run.config) for run in runs]
    common = [f"{name} {value}" for name, value in known[0].items() if all(each.get(name) == value for each in known)]
    return ", ".join(common) if len(runs) > 1 else ""


def _both(run: Run, key: str) -> tuple[float | None, float | None]:
    room, _, rest = key.partition("/")
    names = (key, f"ood_mean/{rest}") if room == "ood" else (f"test/{key}", f"test_mean/{key}")
    return run.last.get(names[0]), run.last.get(names[1])


def _cells(runs: Sequence[Run], key: str) -> Iterator[Cell]:
    values = [_both(run, key) for run in runs]
    best = [unique_best([value[way] for value in values], MEASURES[key]) for way in (0, 1)]
    for number, (posterior, mean) in enumerate(values):
        yield Cell(MEASURES[key], shown(posterior), shown(mean), (number == best[0], number == best[1]), mean is None)


def _link(run: Run, page: Path) -> str | None:
    if not run.config_text:
        return None
    here, there = page.resolve().parent, (run.folder / CONFIG).resolve()
    return there.relative_to(here).as_posix() if there.is_relative_to(here) else there.as_uri()
