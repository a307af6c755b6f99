"""The table of `benchmarks.defaults.modes`: means over seeds, and paired differences with standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.over_seeds import mean_and_error

Record = dict[str, Any]
COLUMNS = ("error", "nll", "calibration", "mi", "entropy_auroc", "mi_auroc", "seconds")
TEMPERED = ("error", "nll", "calibration", "entropy_auroc", "mi_auroc")  # recorded at a fitted temperature too


def table(records: Sequence[Record], tempered: Collection[str] = ("user", "modes", "ensemble", "short")) -> str:
    """Per problem and method: scores, and error and NLL minus those of the user with one temperature."""
    rows = [*records, *(_tempered(r) for r in records if r["method"] in tempered)]
    head = ("problem", "method", "seeds", *COLUMNS, "error - user T", "NLL - user T")
    lines = [head, ["---"] * len(head)]
    for problem in dict.fromkeys(r["problem"] for r in rows):
        for method in dict.fromkeys(r["method"] for r in rows if r["problem"] == problem):
            lines.append(_line(rows, problem, method))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _tempered(record: Record) -> Record:
    """The record at its temperature, as a method of its own."""
    return {**record, "method": f"{record['method']} T", **{name: record[f"{name}_t"] for name in TEMPERED}}


def _line(rows: Sequence[Record], problem: str, method: str) -> list[str]:
    found = {r["seed"]: r for r in rows if (r["problem"], r["method"]) == (problem, method)}
    base = {r["seed"]: r for r in rows if (r["problem"], r["method"]) == (problem, "user T")}
    means = [f"{statistics.mean(r[name] for r in found.values()):.4f}" for name in COLUMNS]
    differences = [_difference(found, base, name) for name in ("error", "nll")]
    return [problem, method, str(len(found)), *means, *differences]


def _difference(found: dict[int, Record], base: dict[int, Record], name: str) -> str:
    """Paired over seeds; an ensemble is compared with the mean of its decade."""
    if any(method.startswith("ensemble") for method in (r["method"] for r in found.values())):
        means = {seed: [b[name] for s, b in base.items() if s // 10 == seed // 10] for seed in found}
        pairs = [found[seed][name] - statistics.mean(values) for seed, values in means.items() if values]
    else:
        pairs = [record[name] - base[seed][name] for seed, record in found.items() if seed in base]
    return mean_and_error(pairs, sign="+") if pairs else f"{math.nan}"
