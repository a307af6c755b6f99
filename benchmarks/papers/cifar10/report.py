"""The table of results and published rows, and the methods that are missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

from benchmarks.over_seeds import mean_and_error
from benchmarks.papers.cifar10.methods import METHODS
from benchmarks.papers.cifar10.networks import NETWORKS
from benchmarks.papers.cifar10.published import PUBLISHED, Row

# Logged name → column; AUROC is that of misclassification detection.
COLUMNS: Final = {
    "test/cls/Acc": "accuracy ↑",
    "test/cls/NLL": "NLL ↓",
    "test/cal/ECE": "ECE ↓",
    "test/mis/AUROC": "AUROC ↑",
    "ood/AUROC": "OOD AUROC ↑",
}
Record = dict[str, Any]  # result of `training.train_and_test`, as stored in JSON


def table(records: list[Record]) -> str:
    """Format a Markdown table: for each model, means ± standard errors over seeds, then the published rows."""
    head = ["model", "method", "settings", *COLUMNS.values(), "epochs", "s/epoch (CPU, clock)", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for model, augment in product(NETWORKS, (False, True)):
        group = [r for r in records if (r["model"], r["augment"]) == (model, augment)]
        name = f"{model}, {'augmented' if augment else 'not augmented'}"
        lines += [f"| {name} | {line}" for line in _measured(group)]
        lines += [f"| {name} | {_published(row)}" for row in PUBLISHED.get((model, augment), ()) if group]
    return "\n".join(lines)


def _measured(records: list[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], record["settings"], record["epochs"]), []).append(record)
    for (method, settings, epochs), group in sorted(groups.items(), key=lambda item: _order(*item[0])):
        cells = [_cell([r["metrics"].get(name, math.nan) for r in group]) for name in COLUMNS]
        cpu, seconds = (statistics.mean(r[cost] for r in group) for cost in ("cpu_seconds", "seconds"))
        yield f"{METHODS[method]} | {settings} | {' | '.join(cells)} | {epochs} | {cpu:.1f}, {seconds:.1f} | {len(group)} |"


def _order(method: str, settings: str, epochs: int) -> tuple[str, int, int]:
    return settings, epochs, list(METHODS).index(method)


def _cell(values: list[float]) -> str:
    return "–" if any(map(math.isnan, values)) else mean_and_error(values)


def _published(row: Row) -> str:
    scores = (row.accuracy, row.nll, row.ece, row.auroc, None)
    cells = ["–" if value is None else f"{value:.4g}" for value in scores]
    return f"*{row.method}* | *{row.source}* | {' | '.join(cells)} | {row.epochs or '–'} | – | – |"


def not_run(records: list[Record]) -> dict[str, list[str]]:
    """The methods without a run, by model."""
    done = {(record["model"], record["method"]) for record in records}
    return {model: [method for method in METHODS if (model, method) not in done] for model in NETWORKS}
