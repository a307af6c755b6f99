"""The table of metrics that ``lightning-bayes test`` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from rich.table import Table

_SINGLE_SHIFT: Final = re.compile(r"shift(_mean)?/(?!all/)[^/]+/\d+/")
EVALUATIONS: Final = ("Value", "Mean", "Scaled")  # under the posterior; at its mean; with the fitted temperature


def metric_table(metrics: Mapping[str, float]) -> Table:
    """A table with one row per metric and one column per evaluation in `EVALUATIONS` that has a value."""
    rows = by_evaluation(metrics)
    columns = [evaluation for evaluation in EVALUATIONS if any(evaluation in values for values in rows.values())]
    table = Table("Metric", *columns)
    for name, values in sorted(rows.items()):
        table.add_row(name, *(f"{values[evaluation]:.4f}" if evaluation in values else "" for evaluation in columns))
    return table


def by_evaluation(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group the values of each metric by evaluation.

    Metrics of single corruptions are left out, because there are many of them and the loggers record them. Their means over
    the kinds of corruption are included.

    Args:
        metrics: Values by metric key.

    Returns:
        For each key without ``_mean`` and ``post/``, its values by the names in `EVALUATIONS`.

    Example:
        >>> logged = {"test/cls/Acc": 0.9, "test_mean/cls/Acc": 0.8, "test/post/cls/Acc": 0.7, "shift/fog/1/cls/Acc": 0.6}
        >>> by_evaluation(logged)
        {'test/cls/Acc': {'Value': 0.9, 'Mean': 0.8, 'Scaled': 0.7}}
    """
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if _SINGLE_SHIFT.match(name):
            continue
        stage, slash, rest = name.partition("/")
        if stage.endswith("_mean"):
            key, evaluation = stage.removesuffix("_mean") + slash + rest, "Mean"
        elif rest.startswith("post/"):
            key, evaluation = stage + slash + rest.removeprefix("post/"), "Scaled"
        else:
            key, evaluation = name, "Value"
        rows.setdefault(key, {})[evaluation] = float(value)
    return rows
