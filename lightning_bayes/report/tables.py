"""The tables of a report: a row a measure, a column a run and a way to evaluate it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_bayes.report.measures import HEADINGS, OOD_HEADINGS, shown, unique_best
from lightning_bayes.report.runs import Run

# First part of a key → its row's name. The best value is marked within one table.
TEST = {"test/": "posterior", "test_mean/": "mean", "test/post/": "temperature-scaled"}
VALIDATION = {"val/": "posterior"}


class Table(NamedTuple):
    """Measures of runs, each run evaluated in one or several ways; a value is None where there is none."""

    title: str
    columns: list[str]
    rows: list[tuple[str, str, list[float | None]]]  # run, way to evaluate, a value for each column

    def best(self, column: int) -> set[int]:
        """The rows with the best value of a column among the same evaluation of all runs, see `unique_best`."""
        ways = dict.fromkeys(way for _, way, _ in self.rows)
        found = (
            unique_best([row[column] if at == way else None for _, at, row in self.rows], self.columns[column])
            for way in ways
        )
        return {number for number in found if number is not None}

    def measures(self) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
        """Yield each heading and its cells: the text, and whether it is the best value."""
        for column, heading in enumerate(self.columns):
            best = self.best(column)
            yield heading, [(shown(row[column]), number in best) for number, (_, _, row) in enumerate(self.rows)]


def metric_tables(runs: Sequence[Run]) -> list[Table]:
    """Build every table that has values.

    Args:
        runs: The runs.

    Returns:
        Test metrics, detection, shift, and the last validation.
    """
    tables = [
        _metrics("Test", TEST, runs),
        *_detection(runs),
        _shift(runs),
        _metrics("Last validation", VALIDATION, runs),
    ]
    return [table for table in tables if table.rows]


def _metrics(title: str, ways: Mapping[str, str], runs: Sequence[Run]) -> Table:
    rows = [
        (run.name, way, [run.last.get(prefix + key) for key in HEADINGS])
        for run in runs
        for prefix, way in ways.items()
    ]
    return _trimmed(Table(title, list(HEADINGS.values()), rows))


def _detection(runs: Sequence[Run]) -> list[Table]:
    keys = _ordered(key.partition("/")[2] for run in runs for key in run.last if key.startswith(("ood/", "ood_mean/")))
    return [_detection_by(measure, keys, runs) for measure in OOD_HEADINGS]


def _detection_by(measure: str, keys: Sequence[str], runs: Sequence[Run]) -> Table:
    # "" for all sets together, or "set/score"; a key with the set alone repeats its entropy.
    sources = [source for source, _, last in (key.rpartition("/") for key in keys) if last == measure]
    sources = sorted(source for source in sources if not source or "/" in source)
    rows = [
        (run.name, way, [run.last.get("/".join(filter(None, (room, each, measure)))) for each in sources])
        for run in runs
        for room, way in (("ood", "posterior"), ("ood_mean", "mean"))
    ]
    heading = OOD_HEADINGS[measure]
    names = [source.replace("/", ", ").replace("_", " ") or "all sets, entropy" for source in sources]
    columns = [f"{name} {heading[-1]}" for name in names]
    return _trimmed(Table(f"Inputs out of distribution: {heading[:-2]}", columns, rows))


def _shift(runs: Sequence[Run]) -> Table:
    rooms = {"shift": "posterior", "shift_mean": "mean"}
    parts = [key.split("/") for run in runs for key in run.last if key.count("/") > 2]  # other keys are not ours
    levels = sorted({int(each[2]) for each in parts if each[0] in rooms and each[1] == "all" and each[2].isdecimal()})
    chosen = {key: HEADINGS[key] for key in ("cls/Acc", "cls/NLL", "cal/ECE")}
    columns = [f"{heading[:-2]}, severity {level} {heading[-1]}" for heading in chosen.values() for level in levels]
    rows = [
        (run.name, way, [run.last.get(f"{room}/all/{level}/{key}") for key in chosen for level in levels])
        for run in runs
        for room, way in rooms.items()
    ]
    return _trimmed(Table("Shift, mean over its kinds", columns, rows))


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List the settings in which the runs differ.

    Args:
        runs: The runs.

    Returns:
        Dotted keys with one value per run, as text.
    """
    keys = _ordered(key for run in runs for key in run.config)
    rows = [(key, [_text(run.config, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "ckpt_path"]


def _text(config: Mapping[str, object], key: str) -> str:
    return str(config[key]) if key in config else "–"


def _ordered(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))  # each once


def _trimmed(table: Table) -> Table:
    """Drop empty rows and columns."""
    rows = [entry for entry in table.rows if any(value is not None for value in entry[2])]
    used = [i for i in range(len(table.columns)) if any(row[i] is not None for _, _, row in rows)]
    kept = [(name, way, [row[i] for i in used]) for name, way, row in rows]
    return Table(table.title, [table.columns[i] for i in used], kept)
