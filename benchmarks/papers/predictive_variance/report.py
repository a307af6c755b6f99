"""Correlations, the published table, and the claims to check."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor

from benchmarks.over_seeds import standard_error
from benchmarks.papers.predictive_variance.approximations import LEARNERS, MEAN_FIELD
from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.published import SETS

Row = dict[str, Any]

# Zhang et al. 2018, Table 4: NNG-FFG, NNG-MVG, NNG-BlkTri, each with its standard error.
PUBLISHED: Final = {
    "boston": ((0.718, 0.035), (0.891, 0.021), (0.889, 0.024)),
    "concrete": ((0.811, 0.028), (0.913, 0.010), (0.922, 0.006)),
    "energy": ((0.438, 0.075), (0.617, 0.087), (0.646, 0.088)),
    "kin8nm": ((0.659, 0.015), (0.731, 0.021), (0.759, 0.023)),
    "naval": ((0.321, 0.087), (0.596, 0.073), (0.598, 0.070)),
    "power": ((0.618, 0.050), (0.829, 0.020), (0.853, 0.020)),
    "wine": ((0.918, 0.014), (0.957, 0.009), (0.964, 0.006)),
    "yacht": ((0.597, 0.063), (0.717, 0.072), (0.727, 0.070)),
}
_COLUMNS: Final = ("noisy_adam_fisher", "noisy_kfac", "block_tridiagonal")


def correlations(left: Tensor, right: Tensor) -> Tensor:
    """Pearson's correlation per row."""
    left, right = (values - values.mean(1, keepdim=True) for values in (left.double(), right.double()))
    return ((left * right).sum(1) / (left.norm(dim=1) * right.norm(dim=1))).float()


def title(method: str) -> str:
    """The title of a method in tables."""
    return "NUTS, half against half" if method == "nuts" else METHODS[method].title


def table(rows: list[Row]) -> str:
    """Format a Markdown table: one line per set, mean ± standard error over trials, published values in brackets."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [["set", *map(title, methods)], ["---", *["---:"] * len(methods)]]
    for name in (name for name in SETS if any(row["set"] == name for row in rows)):
        by_method = {row["method"]: row["correlations"] for row in rows if row["set"] == name}
        lines.append([name, *(_cell(name, method, by_method.get(method)) for method in methods)])
    means = average(rows)
    lines.append(["mean", *(f"{means[method]:.3f}" for method in methods)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, method: str, values: list[float] | None) -> str:
    if values is None:
        return "–"
    text = f"{statistics.fmean(values):.3f}"
    if len(values) > 1:
        text += f" ± {standard_error(values):.3f}"
    if method in _COLUMNS:
        mean, error = PUBLISHED[name][_COLUMNS.index(method)]
        text += f" ({mean:.3f} ± {error:.3f})"
    return text


def average(rows: list[Row]) -> dict[str, float]:
    """Mean correlation of every method over trials and sets."""
    methods = dict.fromkeys(row["method"] for row in rows)
    return {m: statistics.fmean(c for row in rows if row["method"] == m for c in row["correlations"]) for m in methods}


def promises(rows: list[Row]) -> Iterator[str]:
    """Yield one line per claim: a structured posterior is closer to NUTS, on average over sets and trials."""
    means = average(rows)
    if means.keys() >= LEARNERS.keys():
        chain, kfac = means["block_tridiagonal"], means["noisy_kfac"]
        yield f"{_verdict(chain >= kfac)}: block-tridiagonal {chain:.3f} ≥ Noisy K-FAC {kfac:.3f}"
        for method in MEAN_FIELD:
            yield f"{_verdict(kfac > means[method])}: Noisy K-FAC {kfac:.3f} > {title(method)} {means[method]:.3f}"


def _verdict(holds: bool) -> str:
    return "kept" if holds else "BROKEN"
