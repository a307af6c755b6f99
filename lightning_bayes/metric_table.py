"""The table of metrics that ``lightning-bayes test`` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from rich.table import Table

_SINGLE_SHIFT: Final = re.compile(r"shift(_mean)?/(?!all/)[^/]+/\d+/")
WAYS: Final = ("Value", "Mean", "Scaled")  # under the posterior; at its mean; with the fitted temperature


def metric_table(metrics: Mapping[str, float]) -> Table:
    """A table with one row per metric and one column per kind of prediction in `WAYS` that has a value."""
    rows = by_way(metrics)
    columns = [way for way in WAYS if any(way in values for values in rows.values())]
    table = Table("Metric", *columns)
    for name, values in sorted(rows.items()):
        table.add_row(name, *(f"{values[way]:.4f}" if way in values else "" for way in columns))
    return table


def by_way(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group the values of each metric by the kind of prediction.

    Metrics of single corruptions are left out, because they are many; the loggers have them. Their means over the kinds of
    corruption stay.

    Args:
        metrics: Values by metric key.

    Returns:
        For each key without ``_mean`` and ``post/``, its values by the names in `WAYS`.

    Example:
        >>> by_way({"test/cls/Acc": 0.9, "test_mean/cls/Acc": 0.8, "test/post/cls/Acc": 0.7, "shift/fog/1/cls/Acc": 0.6})
        {'test/cls/Acc': {'Value': 0.9, 'Mean': 0.8, 'Scaled': 0.7}}
    """
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if _SINGLE_SHIFT.match(name):
            continue
        stage, slash, rest = name.partition("/")
        if stage.endswith("_mean"):
            key, way = stage.removesuffix("_mean") + slash + rest, "Mean"
        elif rest.startswith("post/"):
            key, way = stage + slash + rest.removeprefix("post/"), "Scaled"
        else:
            key, way = name, "Value"
        rows.setdefault(key, {})[way] = float(value)
    return rows
