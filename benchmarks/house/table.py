"""The printed table, one column per tree."""

from __future__ import annotations

from benchmarks.house.survey import Row


def as_table(columns: dict[str, list[Row]]) -> str:
    """Format the surveys of trees side by side in Markdown.

    Args:
        columns: The rows of each tree by column title; all trees have the same rows.

    Returns:
        The table.

    Example:
        >>> print(as_table({"now": [Row("files", "", "3", [])]}))
        |       | goal | now |
        |-------|------|-----|
        | files |      | 3   |
    """
    header = ["", "goal", *columns]
    rows = [
        [row.label, row.goal, *(column[index].value for column in columns.values())]
        for index, row in enumerate(next(iter(columns.values())))
    ]
    widths = [max(len(line[index]) for line in [header, *rows]) for index in range(len(header))]
    rule = ["-" * (width + 2) for width in widths]
    return "\n".join([_line(header, widths), f"|{'|'.join(rule)}|", *(_line(row, widths) for row in rows)])


def as_details(rows: list[Row]) -> str:
    """Format the places behind every number."""
    blocks = ["\n".join([f"\n{row.label}: {row.value}", *(f"  {detail}" for detail in row.details)]) for row in rows]
    return "\n".join(block for block, row in zip(blocks, rows, strict=True) if row.details)


def _line(cells: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
