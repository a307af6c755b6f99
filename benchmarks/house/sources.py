"""Source files of a tree, their syntax trees, and the lengths of files and functions."""

from __future__ import annotations

import ast
import statistics
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGE = "lightning_bayes"
MAPPED = ("callbacks", "zoo", "configs")  # real directories at the root, links inside the package


class SourceFile:
    """One Python file of the package.

    Args:
        path: The file.
        root: The root of the tree, to which ``name`` is relative.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.name = path.relative_to(root).as_posix()
        self.text = path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """All lines, including docstrings, comments and blank lines."""
        return self.text.splitlines()


class Lengths(NamedTuple):
    """Median, 95th percentile and maximum of a list of lengths."""

    median: float
    p95: float
    largest: int

    def __str__(self) -> str:
        return f"{self.median:g} / {self.p95:g} / {self.largest}"


def source_files(root: Path) -> list[SourceFile]:
    """Every Python file that the wheel of the tree at `root` installs, sorted by path."""
    package = root / PACKAGE
    own = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in MAPPED]
    mapped = [path for name in MAPPED for path in (root / name).rglob("*.py")]
    return [SourceFile(path, root) for path in sorted([*own, *mapped])]


def file_lengths(files: list[SourceFile]) -> Lengths:
    """Lengths of files in lines, including docstrings, comments and blank lines."""
    return lengths([len(file.lines) for file in files])


def function_lengths(files: list[SourceFile]) -> Lengths:
    """Lengths of functions in lines from ``def`` to the end, including docstrings, comments and blank lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for file in files for node in ast.walk(file.tree) if isinstance(node, kinds)]
    return lengths([(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions])


def lengths(sizes: list[int]) -> Lengths:
    """Summarise a list of lengths.

    Args:
        sizes: Lengths, at least one.

    Returns:
        Median, 95th percentile (the smallest length that at least 95 % do not exceed) and maximum.

    Example:
        >>> lengths([1, 2, 3, 4])
        Lengths(median=2.5, p95=4, largest=4)
    """
    ordered = sorted(sizes)
    return Lengths(statistics.median(ordered), ordered[-(-95 * len(ordered) // 100) - 1], ordered[-1])
