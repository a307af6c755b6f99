"""The tables of a report: one row per metric, one column per evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_bayes.report.measures import HEADINGS, OOD_HEADINGS, shown, unique_best
from lightning_bayes.report.runs import Run

# Prefix of a metric key → name of the evaluation.
TEST = {"test/": "posterior", "test_mean/": "mean", "test/post/": "temperature-scaled"}
VALIDATION = {"val/": "posterior"}
OOD = {"ood/": "posterior", "ood_mean/": "mean"}
SHIFT = {"shift/": "posterior", "shift_mean/": "mean"}


class Table(NamedTuple):
    """Metrics of runs and their evaluations. The page shows the table transposed."""

    title: str
    columns: list[str]  # headings of the metrics
    rows: list[tuple[str, str, list[float | None]]]  # run, evaluation, one value per metric; None if not logged

    def best(self, column: int) -> set[int]:
        """For each evaluation, the row with the best value of a metric over all runs; see `unique_best`."""
        winners = set()
        for evaluation in {evaluation for _, evaluation, _ in self.rows}:
            values = [row[column] if name == evaluation else None for _, name, row in self.rows]
            winners.add(unique_best(values, self.columns[column]))
        return {index for index in winners if index is not None}

    def measures(self) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
        """Yield each heading with its cells: the text, and whether it is the best value."""
        for column, heading in enumerate(self.columns):
            best = self.best(column)
            yield heading, [(shown(row[column]), index in best) for index, (_, _, row) in enumerate(self.rows)]


def metric_tables(runs: Sequence[Run]) -> list[Table]:
    """The tables of test metrics, OOD detection, shift and the last validation, without empty ones."""
    tables = [
        _table("Test", HEADINGS, TEST, runs),
        *(_table(f"Out-of-distribution detection: {name}", _detection(name, runs), OOD, runs) for name in OOD_HEADINGS),
        _table("Distribution shift, mean over all kinds", _shift(runs), SHIFT, runs),
        _table("Last validation", HEADINGS, VALIDATION, runs),
    ]
    return [table for table in tables if table.rows]


def _detection(metric: str, runs: Sequence[Run]) -> dict[str, str]:
    """Headings of one metric of OOD detection, by key without the prefix."""
    # A key is METRIC for all sets together, SET/METRIC for the entropy, which SET/SCORE/METRIC repeats.
    keys = [key for key in _logged(OOD, runs) if key.split("/")[-1] == metric and key.count("/") != 1]
    arrow = OOD_HEADINGS[metric][-1]
    headings = {}
    for source in sorted(key.removesuffix(metric) for key in keys):
        name = source.rstrip("/").replace("/", ", ").replace("_", " ")
        headings[source + metric] = f"{name or 'all sets, entropy'} {arrow}"
    return headings


def _shift(runs: Sequence[Run]) -> dict[str, str]:
    """Headings of the metrics at each severity, by key without the prefix."""
    parts = [key.split("/") for key in _logged(SHIFT, runs) if key.count("/") > 1]
    levels = sorted({int(level) for kind, level, *_ in parts if kind == "all" and level.isdecimal()})
    metrics = {key: HEADINGS[key].rsplit(" ", 1) for key in ("cls/Acc", "cls/NLL", "cal/ECE")}
    return {
        f"all/{level}/{key}": f"{heading}, severity {level} {arrow}"
        for key, (heading, arrow) in metrics.items()
        for level in levels
    }


def _logged(evaluations: Iterable[str], runs: Sequence[Run]) -> list[str]:
    """The keys that the runs have logged for any of the evaluations, without the prefix."""
    keys = [key for run in runs for key in run.last]
    return _ordered(key.removeprefix(prefix) for key in keys for prefix in evaluations if key.startswith(prefix))


def _table(title: str, headings: Mapping[str, str], evaluations: Mapping[str, str], runs: Sequence[Run]) -> Table:
    """The table of some metrics, without empty rows and columns."""
    logged = [
        (run.name, evaluation, [run.last.get(prefix + key) for key in headings])
        for run in runs
        for prefix, evaluation in evaluations.items()
    ]
    rows = [row for row in logged if any(value is not None for value in row[2])]
    used = [i for i in range(len(headings)) if any(values[i] is not None for _, _, values in rows)]
    trimmed_rows = [(run, evaluation, [values[i] for i in used]) for run, evaluation, values in rows]
    return Table(title, [list(headings.values())[i] for i in used], trimmed_rows)


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ: dotted keys, each with one value per run as text."""
    keys = _ordered(key for run in runs for key in run.config)
    rows = [(key, [_text(run.config, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "ckpt_path"]


def _text(config: Mapping[str, object], key: str) -> str:
    return str(config[key]) if key in config else "–"


def _ordered(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))
