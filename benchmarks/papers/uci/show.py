"""Show a result of `benchmarks.papers.uci` as table, Markdown or figure, with the longest run of each method.

python -m benchmarks.papers.uci.show RESULT.json [--markdown] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.papers.uci.__main__ import read
from benchmarks.papers.uci.figure import draw
from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.report import Row, markdown, promises, table


def longest(rows: list[Row]) -> list[Row]:
    """For each set and method, the row with the most epochs, then the most weight samples."""
    best: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row["epochs"], row["mc_samples"])):
        best[row["set"], row["method"]] = row
    return sorted(best.values(), key=lambda row: list(METHODS).index(row["method"]))


def main(arguments: list[str] | None = None) -> None:
    """Print the result, and draw it if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a JSON file of benchmarks.papers.uci")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    rows = longest(read(options.result))
    print(markdown(rows) if options.markdown else table(rows))
    print("\n" + "\n".join(f"- {line}" for line in promises(rows)))
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
