"""The table of results and published figures, and the claims that it must support."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from benchmarks.over_seeds import standard_error, with_error
from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.published import KHAN, SETS, ZHANG, Figure

Row: TypeAlias = dict[str, Any]  # one method on one set, as stored in JSON


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over splits and its standard error; ``nan`` for the error of one split."""
    return statistics.mean(values), standard_error(values)


HEAD: Final = (
    *("set", "method", "RMSE", "Zhang et al.", "Khan et al."),
    *("log-likelihood", "Zhang et al.", "Khan et al.", "epochs", "K", "seconds"),
)


def table(rows: list[Row]) -> str:
    """Format one line per set and method, in the order of the published tables."""
    lines = [HEAD, *_lines(rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown(rows: list[Row]) -> str:
    """Format the table as Markdown."""
    lines = [HEAD, ("---", "---", *["---:"] * (len(HEAD) - 2)), *_lines(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    for name in SETS:
        for row in (row for row in rows if row["set"] == name):
            papers = [paper.get(row["method"], {}).get(name) for paper in (ZHANG, KHAN)]
            scores = [
                cell
                for score in ("rmse", "log_likelihood")
                for cell in (
                    _format(mean_and_error(row[score])),
                    *(_format(getattr(figure, score)) if figure else "–" for figure in papers),
                )
            ]
            run = (str(row["epochs"]), str(row["mc_samples"]), f"{row['seconds']:.0f}")
            yield (name, METHODS[row["method"]].title, *scores, *run)


def _format(value: tuple[float, float]) -> str:
    digits = 4 if abs(value[0]) < 0.2 else 3
    return with_error(*value, digits=digits)


def promises(rows: list[Row]) -> Iterator[str]:
    """Yield one line per claim about Noisy K-FAC, if all its rows exist.

    One split has no standard error, so it counts as not measured in the comparison with the published values.
    """
    scores = {(row["set"], row["method"]): mean_and_error(row["log_likelihood"]) for row in rows}
    for rival in ("noisy_adam", "noisy_adam_fisher", "bbb"):
        both = [name for name in SETS if {(name, "noisy_kfac"), (name, rival)} <= scores.keys()]
        better = [name for name in both if scores[name, "noisy_kfac"][0] > scores[name, rival][0]]
        yield _verdict(f"Noisy K-FAC's log-likelihood is better than that of {METHODS[rival].title}", better, both, 7)
    kfac = {name: scores[name, "noisy_kfac"] for name in SETS if (name, "noisy_kfac") in scores}
    measured = [name for name, (_, error) in kfac.items() if not math.isnan(error)]
    near = [name for name in measured if within(kfac[name], ZHANG["noisy_kfac"][name])]
    yield _verdict("it is within two standard errors (both combined) of Zhang et al.'s, or better", near, measured, 6)


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
