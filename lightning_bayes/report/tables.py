"""The tables of a report: one row per metric, one column per evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_bayes.report.measures import HEADINGS, OOD_HEADINGS, shown, unique_best
from lightning_bayes.report.runs import Run

# Prefix of a metric key → name of the evaluation.
TEST = {"test/": "posterior", "test_mean/": "mean", "test/post/": "temperature-scaled"}
VALIDATION = {"val/": "posterior"}


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
        _metrics("Test", TEST, runs),
        *_detection(runs),
        _shift(runs),
        _metrics("Last validation", VALIDATION, runs),
    ]
    return [table for table in tables if table.rows]


def _metrics(title: str, evaluations: Mapping[str, str], runs: Sequence[Run]) -> Table:
    rows = [
        (run.name, evaluation, [run.last.get(prefix + key) for key in HEADINGS])
        for run in runs
        for prefix, evaluation in evaluations.items()
    ]
    return _trimmed(Table(title, list(HEADINGS.values()), rows))


def _detection(runs: Sequence[Run]) -> list[Table]:
    keys = _ordered(key.partition("/")[2] for run in runs for key in run.last if key.startswith(("ood/", "ood_mean/")))
    return [_detection_by(metric, keys, runs) for metric in OOD_HEADINGS]


def _detection_by(metric: str, keys: Sequence[str], runs: Sequence[Run]) -> Table:
    # A key is METRIC for all sets together, SET/METRIC for the entropy, which SET/SCORE/METRIC repeats.
    sources = [source for source, _, last in (key.rpartition("/") for key in keys) if last == metric]
    sources = sorted(source for source in sources if not source or "/" in source)
    rows = [
        (run.name, evaluation, [run.last.get("/".join(filter(None, (prefix, source, metric)))) for source in sources])
        for run in runs
        for prefix, evaluation in (("ood", "posterior"), ("ood_mean", "mean"))
    ]
    heading, arrow = OOD_HEADINGS[metric].split()
    names = [source.replace("/", ", ").replace("_", " ") or "all sets, entropy" for source in sources]
    columns = [f"{name} {arrow}" for name in names]
    return _trimmed(Table(f"Out-of-distribution detection: {heading}", columns, rows))


def _shift(runs: Sequence[Run]) -> Table:
    prefixes = {"shift": "posterior", "shift_mean": "mean"}
    paths = [key.split("/") for run in runs for key in run.last if key.count("/") > 2]
    levels = sorted(
        {int(level) for prefix, kind, level, *_ in paths if prefix in prefixes and kind == "all" and level.isdecimal()}
    )
    metrics = {key: HEADINGS[key].rsplit(" ", 1) for key in ("cls/Acc", "cls/NLL", "cal/ECE")}
    columns = [f"{heading}, severity {level} {arrow}" for heading, arrow in metrics.values() for level in levels]
    rows = [
        (run.name, evaluation, [run.last.get(f"{prefix}/all/{level}/{key}") for key in metrics for level in levels])
        for run in runs
        for prefix, evaluation in prefixes.items()
    ]
    return _trimmed(Table("Distribution shift, mean over all kinds", columns, rows))


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ: dotted keys, each with one value per run as text."""
    keys = _ordered(key for run in runs for key in run.config)
    rows = [(key, [_text(run.config, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "ckpt_path"]


def _text(config: Mapping[str, object], key: str) -> str:
    return str(config[key]) if key in config else "–"


def _ordered(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))


def _trimmed(table: Table) -> Table:
    """Drop empty rows and columns."""
    rows = [row for row in table.rows if any(value is not None for value in row[2])]
    used = [i for i in range(len(table.columns)) if any(values[i] is not None for _, _, values in rows)]
    trimmed_rows = [(run, evaluation, [values[i] for i in used]) for run, evaluation, values in rows]
    return Table(table.title, [table.columns[i] for i in used], trimmed_rows)
