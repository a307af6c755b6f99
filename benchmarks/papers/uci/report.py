"""The table beside the published figures, and what it has to show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, TypeAlias

from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.published import KHAN, SETS, ZHANG, Figure

Row: TypeAlias = dict[str, Any]  # one method on one set, as JSON keeps it


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over splits and its standard error; ``nan`` for the error of one split."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


def table(rows: list[Row]) -> str:
    """One line for each set and method, in the order of the published tables.

    Args:
        rows: Results.

    Returns:
        Text.
    """
    head = f"{'set':10}{'method':20}{'RMSE':>18}{'Zhang et al.':>17}{'Khan et al.':>16}"
    lines = [head + f"{'log-likelihood':>20}{'Zhang et al.':>17}{'Khan et al.':>16}{'epochs':>8}{'K':>4}{'s':>7}"]
    for name in SETS:
        for row in (row for row in rows if row["set"] == name):
            lines.append(_line(row))
    return "\n".join(lines)


def _line(row: Row) -> str:
    name, method = row["set"], row["method"]
    cells = [f"{name:10}{METHODS[method].title:20}"]
    published = [paper.get(method, {}).get(name) for paper in (ZHANG, KHAN)]
    for score, width in (("rmse", 18), ("log_likelihood", 20)):
        cells.append(f"{_in_words(mean_and_error(row[score])):>{width}}")
        cells += [
            f"{_in_words(getattr(figure, score)) if figure else '–':>{space}}"
            for figure, space in zip(published, (17, 16), strict=True)
        ]
    return "".join(cells) + f"{row['epochs']:8}{row['mc_samples']:4}{row['seconds']:7.0f}"


def _in_words(value: tuple[float, float]) -> str:
    digits = 4 if abs(value[0]) < 0.2 else 3
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def promises(rows: list[Row]) -> Iterator[str]:
    """What the table has to show about Noisy K-FAC.

    Args:
        rows: Results.

    Yields:
        One line for each promise whose rows are all there.
    """
    found = {(row["set"], row["method"]): mean_and_error(row["log_likelihood"]) for row in rows}
    for rival in ("noisy_adam", "noisy_adam_fisher", "bbb"):
        both = [name for name in SETS if {(name, "noisy_kfac"), (name, rival)} <= found.keys()]
        better = [name for name in both if found[name, "noisy_kfac"][0] > found[name, rival][0]]
        yield _verdict(f"Noisy K-FAC's log-likelihood is better than that of {METHODS[rival].title}", better, both, 7)
    known = [name for name in SETS if (name, "noisy_kfac") in found]
    near = [name for name in known if within(found[name, "noisy_kfac"], ZHANG["noisy_kfac"][name])]
    yield _verdict("it is within two standard errors (both combined) of Zhang et al.'s, or better", near, known, 6)


def within(ours: tuple[float, float], theirs: Figure) -> bool:
    """Whether a log-likelihood is at most two standard errors of the difference below a published one."""
    mean, error = theirs.log_likelihood
    return ours[0] - mean >= -2 * math.hypot(ours[1], error)


def _verdict(claim: str, kept: list[str], of: list[str], needed: int) -> str:
    missing = [name for name in of if name not in kept]
    word = "not measured on all sets" if len(of) < len(SETS) else "kept" if len(kept) >= needed else "BROKEN"
    return f"{word}: {claim} on {len(kept)} of {len(of)} sets (needed: {needed} of {len(SETS)})" + (
        f"; not on {', '.join(missing)}" if missing else ""
    )
