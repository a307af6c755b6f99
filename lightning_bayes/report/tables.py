"""The tables of a report: one row per metric, one column per evaluation of a run; headings and format of the values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Final, NamedTuple

from lightning_bayes.report.runs import Run

# Metric key without its stage → heading. The arrow points in the better direction.
HEADINGS: Final = {
    "n": "test examples",
    "cls/Acc": "accuracy ↑",
    "cls/NLL": "NLL ↓",
    "cls/NLL_SE": "NLL, standard error",
    "cls/Brier": "Brier ↓",
    "cls/MI": "mutual information",
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
OOD_HEADINGS: Final = {"AUROC": "AUROC ↑", "AUPR": "AUPR ↑", "FPR95": "FPR95 ↓"}

# What follows the stage in a metric key → name of the evaluation.
EVALUATIONS: Final = {"": "posterior", "_mean": "mean"}


Cell = tuple[str, bool]  # the text, empty if not logged, and whether the value is the best


class Table(NamedTuple):
    """Metrics of runs and their evaluations."""

    title: str
    columns: list[tuple[str, str]]  # run and evaluation
    rows: list[tuple[str, list[Cell]]]  # heading of the metric, and one cell per column

    def without_empty_columns(self) -> Table:
        """The table of the columns with a value."""
        used = [any(cells[i][0] for _, cells in self.rows) for i in range(len(self.columns))]
        rows = [(heading, list(compress(cells, used))) for heading, cells in self.rows]
        return Table(self.title, list(compress(self.columns, used)), rows)


def shown(value: float | None) -> str:
    """Format a value with four decimals, a whole number above one without; a missing value or NaN is a dash."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value > 1 and value == round(value) else f"{value:.4f}"


def unique_best(values: Sequence[float | None], heading: str) -> int | None:
    """The index of the best of several values, in the direction of the heading's arrow; None without one, or if tied."""
    displayed = {index: float(shown(value)) for index, value in enumerate(values) if shown(value) != "–"}
    if len(displayed) < 2 or heading[-1] not in "↑↓":
        return None
    best = max(displayed.values()) if heading.endswith("↑") else min(displayed.values())
    winners = [index for index, value in displayed.items() if value == best]
    return winners[0] if len(winners) == 1 else None


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
    return [table.without_empty_columns() for table in tables if table.rows]


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
    """The table of the metrics that at least one run has logged, with a column for every run and every evaluation."""
    rows = [
        (heading, [cell for cells in metric_cells(key, heading, runs) for cell in cells])
        for key, heading in headings.items()
    ]
    columns = [(run.name, evaluation) for run in runs for evaluation in EVALUATIONS.values()]
    return Table(title, columns, [(heading, cells) for heading, cells in rows if any(text for text, _ in cells)])


def metric_cells(key: str, heading: str, runs: Sequence[Run]) -> list[tuple[Cell, ...]]:
    """For each run, one metric's cell for every evaluation. The best is that of one evaluation over all runs."""
    columns = []
    for suffix in EVALUATIONS:
        values = [run.last.get(key.replace("/", f"{suffix}/", 1)) for run in runs]
        best = unique_best(values, heading)
        columns.append([("" if value is None else shown(value), index == best) for index, value in enumerate(values)])
    return list(zip(*columns, strict=True))


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ: dotted keys, each with one value per run as text."""
    keys = _ordered(key for run in runs for key in run.config)
    rows = [(key, [_text(run.config, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "ckpt_path"]


def _text(config: Mapping[str, object], key: str) -> str:
    return str(config[key]) if key in config else "–"


def _ordered(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))
