"""Successes of each method, seed by seed, and what has to hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

Row: TypeAlias = dict[str, Any]  # one method and seed, as JSON keeps it

TITLES: Final = {"none": "no bonus", "bbb": "VIME, mean-field (BBB)", "mvg": "VIME, matrix-variate"}
NEEDED: Final = 4 / 5


def successes(rows: list[Row], method: str) -> dict[int, int]:
    """Episodes at the goal of each seed."""
    return {row["seed"]: sum(row["successes"]) for row in rows if row["method"] == method}


def table(rows: list[Row]) -> str:
    """Markdown: successes and episodes of every seed."""
    lines = [
        "| method | iterations | successes of each seed | of all episodes | seconds |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for method, title in TITLES.items():
        if found := [row for row in rows if row["method"] == method]:
            episodes = sum(sum(row["episodes"]) for row in found)
            each = ", ".join(f"{sum(row['successes'])}" for row in found)
            total, seconds = sum(successes(rows, method).values()), sum(row["seconds"] for row in found)
            lines.append(f"| {title} | {len(found[0]['episodes'])} | {each} | {total} of {episodes} | {seconds:.0f} |")
    return "\n".join(lines)


def promises(rows: list[Row]) -> Iterator[str]:
    """What has to hold, on the seeds that both methods have.

    Args:
        rows: Results.

    Yields:
        A line for each comparison.
    """
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
