"""Print the size and shape of the source code beside the budgets, optionally compared with an old commit.

    python -m benchmarks.house                      # the working tree
    python -m benchmarks.house --before e832fe1     # compared with an old commit
    python -m benchmarks.house --details            # the places behind every number

The budgets are those of the architecture test.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.house.private_symbols import is_table, private_uses
from benchmarks.house.sources import (
    SourceFile,
    constructors,
    forwarders,
    function_lengths,
    import_circles,
    source_files,
)
from benchmarks.house.trees import ROOT, run_probe, short_name, worktree

LONG = 300  # lines of a file
BATCHES = {  # files and functions that a VOGN batch may pass
    "MLP, measured": (20, 75),
    "MLP, not measured": (11, 32),
    "LeNet, measured": (24, 85),
    "LeNet, not measured": (11, 32),
}


class Row(NamedTuple):
    """One line of the table, with the places behind its value."""

    label: str
    budget: str
    value: str
    details: list[str]


def survey(root: Path) -> list[Row]:
    """Measure the tree at `root`; the order of the rows is the same for every tree."""
    files, probed = source_files(root), run_probe("house/probe", root)
    return [
        *_sizes(files, root),
        *_shape(files),
        *_classes(files, probed["classes"]),
        *_batches(probed["batches"], forwarders(files)),
    ]


def _sizes(files: list[SourceFile], root: Path) -> list[Row]:
    long = [f"{len(file.lines)} {file.name}" for file in files if len(file.lines) > LONG]
    return [
        Row("lines of the package", "31,000", f"{sum(len(file.lines) for file in files):,}", []),
        Row("lines of benchmarks", "7,500", f"{_lines(root / 'benchmarks'):,}", []),
        Row("lines of tests", "35,000", f"{_lines(root / 'tests'):,}", []),
        Row("words of docs", "18,000", f"{_words(root):,}", []),
        Row("files of the package", "300", str(len(files)), []),
        Row(f"files over {LONG} lines", "0", str(len(long)), long),
        Row("median file", "< 200", f"{statistics.median(len(file.lines) for file in files):g}", []),
        Row("median function, with docstring", "≤ 10", f"{statistics.median(function_lengths(files)):g}", []),
    ]


def _lines(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def _words(root: Path) -> int:
    """Words of the pages in ``docs`` and of the README, code blocks and tables included."""
    return sum(len(path.read_text("utf-8").split()) for path in [root / "README.md", *(root / "docs").rglob("*.md")])


def _shape(files: list[SourceFile]) -> list[Row]:
    uses, circles = private_uses(files), import_circles(files)
    outside = [use for use in uses if not is_table(use.file)]
    return [
        Row("import circles, typing included", "0", str(len(circles)), sorted(" ↔ ".join(sorted(c)) for c in circles)),
        Row("private symbols of other libraries", "", str(len({use.name for use in uses})), []),
        Row("uses of them outside of tables", "0", str(len(outside)), [
            f"{use.file}:{use.line}: {use.name}" for use in outside
        ]),
    ]  # fmt: skip


def _classes(files: list[SourceFile], inherited: dict[str, Any]) -> list[Row]:
    ordered = constructors(files)
    return [
        Row("arguments of the largest constructor", "≤ 12", f"{ordered[0].own} ({ordered[0].name})", [
            f"{each.name}: {each.own}" for each in ordered[:8]
        ]),
        Row("levels of inheritance", "≤ 3", str(inherited["levels"]), inherited["deepest"]),
    ]  # fmt: skip


def _batches(batches: dict[str, list[list[str]]], forwarding: set[tuple[str, int]]) -> list[Row]:
    rows = [
        Row(
            f"{name}: files / functions of a batch",
            f"≤ {files} / ≤ {functions}",
            f"{len({file for file, _ in batches[name]})} / {len(batches[name])}",
            [f"{file}: {function}" for file, function in batches[name]],
        )
        for name, (files, functions) in BATCHES.items()
    ]
    passed = {(file, function) for calls in batches.values() for file, function in calls}
    found = sorted(f"{file}: {name}" for file, name in passed if (file, int(name.rpartition(":")[2])) in forwarding)
    only = Row("functions that only call another", "", str(len(forwarding)), [])
    return [*rows, only, Row("of these in a batch", "0", str(len(found)), found)]


def as_table(columns: dict[str, list[Row]]) -> str:
    """Format the surveys of trees side by side in Markdown; all trees have the same rows."""
    header = ["", "budget", *columns]
    labels = [(row.label, row.budget) for row in next(iter(columns.values()))]
    rows = [[*label, *(column[index].value for column in columns.values())] for index, label in enumerate(labels)]
    widths = [max(len(line[index]) for line in [header, *rows]) for index in range(len(header))]
    cells = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {cells[0]} |", f"|{rule}|", *(f"| {line} |" for line in cells[1:])])


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.house", description="Size and shape of the source code."
    )
    parser.add_argument("--before", metavar="REV", help="a commit to compare with the working tree")
    parser.add_argument("--details", action="store_true", help="list the places behind every number")
    options = parser.parse_args(arguments)
    columns: dict[str, list[Row]] = {}
    if options.before:
        with worktree(options.before) as tree:
            columns[short_name(options.before)] = survey(tree)
    columns["working tree"] = survey(ROOT)
    print(as_table(columns))
    for row in columns["working tree"] if options.details else []:
        if row.details:
            print("\n".join([f"\n{row.label}: {row.value}", *(f"  {detail}" for detail in row.details)]))


if __name__ == "__main__":
    main()
