"""Print metrics of the source code for the working tree, optionally compared with an old commit.

    python -m benchmarks.house                      # the working tree
    python -m benchmarks.house --before f07f3a5     # compared with an old commit
    python -m benchmarks.house --details            # the places behind every number

Each module documents how it counts: ``sources`` (lengths), ``constructors``, ``class_probe`` (inheritance),
``private_symbols``, ``prior_strength`` (copies of δ̃), and ``batch_path`` with ``batch_probe`` (one batch of VOGN).
"""

from __future__ import annotations

import argparse

from benchmarks.house.survey import Row, survey
from benchmarks.house.table import as_details, as_table
from benchmarks.trees import ROOT, short_name, worktree


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description="Metrics of the source code.")
    parser.add_argument("--before", metavar="REV", help="a commit to compare with the working tree")
    parser.add_argument("--details", action="store_true", help="list the places behind every number")
    options = parser.parse_args(arguments)
    columns: dict[str, list[Row]] = {}
    if options.before:
        with worktree(options.before) as tree:
            columns[short_name(options.before)] = survey(tree)
    columns["working tree"] = survey(ROOT)
    print(as_table(columns))
    if options.details:
        print(as_details(columns["working tree"]))


if __name__ == "__main__":
    main()
