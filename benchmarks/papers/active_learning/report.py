"""The table of results and published values, and the claims to check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.papers.active_learning.published import ERRORS, PUBLISHED, SETS
from benchmarks.papers.uci.methods import METHODS

Row = dict[str, Any]


class Estimate(NamedTuple):
    """A mean over trials and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Estimate:
        """Estimate from values ``[T]``."""
        return cls(float(values.mean()), float(values.std() / len(values) ** 0.5))

    def __str__(self) -> str:
        """Format with three decimals."""
        return f"{self.mean:.3f} ± {self.error:.3f}"


class Final(NamedTuple):
    """Errors of the last fit: random, active, and active minus random in the same trial."""

    random: Estimate
    active: Estimate
    paired: Estimate


def last(row: Row) -> Final:
    """Errors of the last fit, from a row with ``rmse`` ``[fits, 2 T]``."""
    active, random = torch.tensor(row["rmse"][-1]).double().chunk(2)
    return Final(Estimate.of(random), Estimate.of(active), Estimate.of(active - random))


def table(rows: list[Row]) -> str:
    """Format a Markdown table: one line per set and method, with the published values."""
    lines = [
        "| set | method | random | active | active − random, paired | published: random, active |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        published = PUBLISHED.get(row["method"], {}).get(row["set"])
        text = "–" if published is None else f"{published[0]:.3f}, {published[1]:.3f}"
        cells = [row["set"], METHODS[row["method"]].title, *map(str, last(row)), text]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def promises(rows: list[Row]) -> Iterator[str]:
    """Whether selection by variance beats random selection, and a structured posterior beats mean field."""
    kfac = {row["set"]: last(row) for row in rows if row["method"] == "noisy_kfac"}
    adam = {row["set"]: last(row) for row in rows if row["method"] == "noisy_adam_fisher"}
    better = [name for name, final in kfac.items() if final.paired.mean < 0]
    yield _line(len(better), len(kfac), "Noisy K-FAC, active below random", better)
    both = [name for name in kfac if name in adam]
    better = [name for name in both if kfac[name].active.mean <= adam[name].active.mean]
    yield _line(len(better), len(both), "active, Noisy K-FAC at most Noisy Adam", better)
    for name in (name for name in SETS if name in kfac):
        pairs = zip(kfac[name][:2], PUBLISHED["noisy_kfac"][name], ERRORS[name], strict=True)
        away = [(ours.mean - mean) / (ours.error**2 + error**2) ** 0.5 for ours, mean, error in pairs]
        yield f"{name}, Noisy K-FAC against the paper, in standard errors: random {away[0]:+.1f}, active {away[1]:+.1f}"


def _line(count: int, of: int, claim: str, names: list[str]) -> str:
    verdict = "kept" if 4 * count >= 3 * of > 0 else "BROKEN"
    return f"{verdict}: {claim} on {count} of {of} sets ({', '.join(names) or 'none'})"
