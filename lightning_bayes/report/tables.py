"""The tables of a report: one row per metric, one column per evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from lightning_bayes.report.measures import HEADINGS, OOD_HEADINGS, shown, unique_best
from lightning_bayes.report.runs import Run

# What follows the stage in a metric key → name of the evaluation.
EVALUATIONS: Final = {"": "posterior", "_mean": "mean", "/post": "temperature-scaled"}


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
        """Yield each heading with its cells: the text, empty if not logged, and whether it is the best value."""
        for column, heading in enumerate(self.columns):
            best = self.best(column)
            values = [row[column] for _, _, row in self.rows]
            texts = ["" if value is None else shown(value) for value in values]
            yield heading, [(text, index in best) for index, text in enumerate(texts)]


def metric_tables(runs: Sequence[Run]) -> list[Table]:
    """The tables of test metrics, OOD detection, shift and the last validation, without empty ones."""
    tables = [
        logged_table("Test", {f"test/{key}": heading for key, heading in HEADINGS.items()}, runs),
        *(
            logged_table(f"Out-of-distribution detection: {name}", _detection(name, runs), runs)
            for name in OOD_HEADINGS
        ),
        logged_table("Distribution shift, mean over all kinds", _shift(runs), runs),
        logged_table("Last validation", {f"val/{key}": heading for key, heading in HEADINGS.items()}, runs),
    ]
    trimmed = [table._replace(rows=[row for row in table.rows if set(row[2]) != {None}]) for table in tables]
    return [table for table in trimmed if table.columns]


def _detection(metric: str, runs: Sequence[Run]) -> dict[str, str]:
    """Headings of one metric of OOD detection, by key."""
    # A key is ood/METRIC for all sets together, ood/SET/METRIC for the entropy, which ood/SET/SCORE/METRIC repeats.
    keys = [key for key in _logged("ood", runs) if key.split("/")[-1] == metric and key.count("/") != 2]
    arrow = OOD_HEADINGS[metric][-1]
    headings = {}
    for source in sorted(key.removesuffix(metric) for key in keys):
        name = source.removeprefix("ood/").rstrip("/").replace("/", ", ").replace("_", " ")
        headings[source + metric] = f"{name or 'all sets, entropy'} {arrow}"
    return headings


def _shift(runs: Sequence[Run]) -> dict[str, str]:
    """Headings of the metrics at each severity, by key."""
    parts = [key.split("/") for key in _logged("shift", runs) if key.count("/") > 2]
    levels = sorted({int(level) for _, kind, level, *_ in parts if kind == "all" and level.isdecimal()})
    metrics = {key: HEADINGS[key].rsplit(" ", 1) for key in ("cls/Acc", "cls/NLL", "cal/ECE")}
    return {
        f"shift/all/{level}/{key}": f"{heading}, severity {level} {arrow}"
        for key, (heading, arrow) in metrics.items()
        for level in levels
    }


def _logged(stage: str, runs: Sequence[Run]) -> list[str]:
    """The keys of a stage that the runs have logged under the posterior or at its mean, without ``_mean``."""
    keys = _ordered(key.replace(f"{stage}_mean/", f"{stage}/", 1) for run in runs for key in run.last)
    return [key for key in keys if key.startswith(f"{stage}/")]


def logged_table(title: str, headings: Mapping[str, str], runs: Sequence[Run]) -> Table:
    """The table of the metrics that at least one run has logged.

    Args:
        title: The title.
        headings: Headings by metric key.
        runs: The runs.

    Returns:
        The table, with a row for every run and every evaluation.
    """
    rows = [
        (run.name, evaluation, [run.last.get(key.replace("/", f"{suffix}/", 1)) for key in headings])
        for run in runs
        for suffix, evaluation in EVALUATIONS.items()
    ]
    used = [i for i in range(len(headings)) if any(values[i] is not None for _, _, values in rows)]
    used_rows = [(run, evaluation, [values[i] for i in used]) for run, evaluation, values in rows]
    return Table(title, [list(headings.values())[i] for i in used], used_rows)


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ: dotted keys, each with one value per run as text."""
    keys = _ordered(key for run in runs for key in run.config)
    rows = [(key, [_text(run.config, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "ckpt_path"]


def _text(config: Mapping[str, object], key: str) -> str:
    return str(config[key]) if key in config else "–"


def _ordered(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))
