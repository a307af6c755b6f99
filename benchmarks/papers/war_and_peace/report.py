"""The table of results, and the claims to check."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.papers.war_and_peace.methods import METHODS

Row = dict[str, Any]

ADAM_AFTER_ONE_EPOCH: Final = 1.70  # nats; DeepOBS has 1.754 after one epoch and 1.630 after two
WITHIN: Final = 0.05


def mean(rows: list[Row], method: str, key: str) -> float:
    """Mean over seeds."""
    return statistics.fmean(row[key] for row in rows if row["method"] == method)


def table(rows: list[Row]) -> str:
    """Format a Markdown table: mean, minimum and maximum over seeds."""
    lines = [
        "| method | seeds | test nats | at the mean | bits | perplexity | ECE of characters | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        nats = [row["nats"] for row in rows if row["method"] == method]
        cells = [
            METHODS[method].title,
            str(len(nats)),
            f"{statistics.fmean(nats):.3f} ({min(nats):.3f}–{max(nats):.3f})",
        ]
        cells += [f"{mean(rows, method, key):.3f}" for key in ("nats_at_mean", "bits", "perplexity")]
        cells += [f"{mean(rows, method, 'ece'):.4f}", f"{mean(rows, method, 'seconds'):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def promises(rows: list[Row], epochs: int) -> Iterator[str]:
    """Yield one line per claim: Adam learns as expected, and Vadam learns like Adam."""
    methods = {row["method"] for row in rows}
    if "adam" in methods:
        nats = mean(rows, "adam", "nats")
        claim = f"Adam {nats:.3f} ≤ {ADAM_AFTER_ONE_EPOCH:.2f} nats after {epochs} epochs"
        yield _line(nats <= ADAM_AFTER_ONE_EPOCH, claim)
    if {"adam", "vadam"} <= methods:
        away = mean(rows, "vadam", "nats") - mean(rows, "adam", "nats")
        yield _line(away <= WITHIN, f"Vadam is {away:+.3f} nats from Adam, at most {WITHIN:+.2f}")
        errors = mean(rows, "vadam", "ece"), mean(rows, "adam", "ece")
        yield _line(errors[0] <= errors[1], f"ECE of Vadam {errors[0]:.4f} ≤ {errors[1]:.4f} of Adam")
    if {"vadagrad", "sgd"} <= methods:
        away = mean(rows, "vadagrad", "nats") - mean(rows, "sgd", "nats")
        yield f"VadaGrad as printed is {away:+.3f} nats from SGD (the paper: equal)"


def _line(holds: bool, claim: str) -> str:
    return f"{'kept' if holds else 'BROKEN'}: {claim}"
