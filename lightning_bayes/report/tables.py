"""The tables of a report, with the best value of each column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_bayes.report.runs import Run

# First part of a key → its row's name. The best value is marked within one table.
TEST = {"test/": "test", "test_mean/": "test, mean", "test/post/": "test, temperature-scaled"}
VALIDATION = {"val/": "validation"}
# Rest of the key → heading. The arrow is the better direction.
COLUMNS = {
    "cls/Acc": "accuracy ↑",
    "cls/NLL": "NLL ↓",
    "cls/Brier": "Brier ↓",
    "cal/ECE": "ECE ↓",
    "cal/aECE": "adaptive ECE ↓",
    "cal/cECE": "class-wise ECE ↓",
    "cal/MCE": "MCE ↓",
    "sc/AURC": "AURC ↓",
    "sc/Cov_5Risk": "coverage at 5 % risk ↑",
    "sc/Risk_80Cov": "risk at 80 % coverage ↓",
    "mis/AUROC": "error AUROC ↑",
    "mis/AUPR": "error AUPR ↑",
    "mis/FPR95": "error FPR95 ↓",
    "reg/RMSE": "RMSE ↓",
    "reg/NLL": "NLL per point ↓",
}
OOD_MEASURES = {"AUROC": "AUROC ↑", "AUPR": "AUPR ↑", "FPR95": "FPR95 ↓"}


class Table(NamedTuple):
    """Rows by name; a cell is None where there is no value."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[float | None]]]

    def best(self, column: int) -> float | None:
        """The best value of a column whose heading has an arrow, if there are at least two."""
        values = [row[column] for _, row in self.rows]
        known = [value for value in values if value is not None and not math.isnan(value)]
        if len(known) < 2 or self.columns[column][-1] not in "↑↓":
            return None
        return max(known) if self.columns[column].endswith("↑") else min(known)

    def marked_rows(self) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
        """Yield the name of each row and its cells: the text, and whether it is the best value of its column."""
        best = [self.best(column) for column in range(len(self.columns))]
        for name, values in self.rows:
            yield name, [_cell(value, of_column) for value, of_column in zip(values, best, strict=True)]


def _cell(value: float | None, best: float | None) -> tuple[str, bool]:
    known = value is not None and not math.isnan(value)
    return (f"{value:.4f}", value == best) if known else ("–", False)


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
        (f"{run.name}: {way}", [run.last.get(prefix + key) for key in COLUMNS])
        for run in runs
        for prefix, way in ways.items()
    ]
    return _trimmed(Table(title, list(COLUMNS.values()), rows))


def _detection(runs: Sequence[Run]) -> list[Table]:
    keys = _ordered(key.partition("/")[2] for run in runs for key in run.last if key.startswith(("ood/", "ood_mean/")))
    return [_detection_by(measure, keys, runs) for measure in OOD_MEASURES]


def _detection_by(measure: str, keys: Sequence[str], runs: Sequence[Run]) -> Table:
    # "" for all sets together, or "set/score"; a key with the set alone repeats its entropy.
    sources = [source for source, _, last in (key.rpartition("/") for key in keys) if last == measure]
    sources = sorted(source for source in sources if not source or "/" in source)
    rows = [
        (f"{run.name}: {way}", [run.last.get("/".join(filter(None, (room, each, measure)))) for each in sources])
        for run in runs
        for room, way in (("ood", "test"), ("ood_mean", "test, mean"))
    ]
    heading = OOD_MEASURES[measure]
    names = [source.replace("/", ", ").replace("_", " ") or "all sets, entropy" for source in sources]
    columns = [f"{name} {heading[-1]}" for name in names]
    return _trimmed(Table(f"Inputs out of distribution: {heading[:-2]}", columns, rows))


def _shift(runs: Sequence[Run]) -> Table:
    rooms = {"shift": "test", "shift_mean": "test, mean"}
    parts = [key.split("/") for run in runs for key in run.last if key.count("/") > 2]  # other keys are not ours
    levels = sorted({int(each[2]) for each in parts if each[0] in rooms and each[1] == "all" and each[2].isdecimal()})
    chosen = {key: COLUMNS[key] for key in ("cls/Acc", "cls/NLL", "cal/ECE")}
    columns = [f"{heading[:-2]}, severity {level} {heading[-1]}" for heading in chosen.values() for level in levels]
    rows = [
        (f"{run.name}: {way}", [run.last.get(f"{room}/all/{level}/{key}") for key in chosen for level in levels])
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
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _text(config: Mapping[str, object], key: str) -> str:
    return str(config[key]) if key in config else "–"


def _ordered(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))  # each once


def _trimmed(table: Table) -> Table:
    """Drop empty rows and columns."""
    rows = [(name, row) for name, row in table.rows if any(value is not None for value in row)]
    used = [i for i in range(len(table.columns)) if any(row[i] is not None for _, row in rows)]
    return Table(table.title, [table.columns[i] for i in used], [(name, [row[i] for i in used]) for name, row in rows])
