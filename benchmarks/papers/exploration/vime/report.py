"""Successes of each method and seed, and the claims to check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

Row: TypeAlias = dict[str, Any]  # one method and seed, as stored in JSON

TITLES: Final = {"none": "no bonus", "bbb": "VIME, mean-field (BBB)", "mvg": "VIME, matrix-variate"}
NEEDED: Final = 4 / 5


def successes(rows: list[Row], method: str) -> dict[int, int]:
    """Successful episodes per seed."""
    return {row["seed"]: sum(row["successes"]) for row in rows if row["method"] == method}


def table(rows: list[Row]) -> str:
    """Format a Markdown table of successes and episodes per seed."""
    lines = [
        "| method | iterations | successes of each seed | of all episodes | seconds |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for method, title in TITLES.items():
        runs = [row for row in rows if row["method"] == method]
        if runs:
            episodes = sum(sum(row["episodes"]) for row in runs)
            by_seed = ", ".join(f"{sum(row['successes'])}" for row in runs)
            total, seconds = sum(successes(rows, method).values()), sum(row["seconds"] for row in runs)
            iterations = len(runs[0]["episodes"])
            lines.append(f"| {title} | {iterations} | {by_seed} | {total} of {episodes} | {seconds:.0f} |")
    return "\n".join(lines)


def promises(rows: list[Row]) -> Iterator[str]:
    """Yield one line per comparison, on the seeds that both methods have."""
    mvg = successes(rows, "mvg")
    for rival in ("none", "bbb"):
        other = successes(rows, rival)
        both = sorted(mvg.keys() & other.keys())
        if not both:
            continue
        more = [seed for seed in both if mvg[seed] > other[seed]]
        claim = f"matrix-variate has more successes than {TITLES[rival]} on {len(more)} of {len(both)} seeds"
        if rival == "none":
            word = "kept" if len(more) >= NEEDED * len(both) else "BROKEN"
            yield f"{word}: {claim} (needed: 4 of 5)"
        else:
            yield claim
