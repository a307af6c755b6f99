"""Uses of private names of Lightning, torch and BackPACK.

A name with one leading underscore is foreign if the package does not define it. It can be used as an attribute
(``node._saved_dim``), as a string (``getattr(node, "_saved_dim")``), or in an import. The ``torch._foreach_*`` functions,
which have no public name, and Python's own names, such as ``NamedTuple._replace``, are excluded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.house.sources import PACKAGE, SourceFile

_PRIVATE = re.compile(r"_[A-Za-z0-9]\w*")
_PYTHONS = {"_fields", "_asdict", "_replace", "_make", "_field_defaults", "_getframe", "_value_", "_name_", "_missing_"}
_TEXT_METHODS = set(
    ["startswith", "endswith", "removeprefix", "removesuffix", "replace", "split", "partition", "rpartition"]
)


class PrivateUse(NamedTuple):
    """One use of a foreign private name."""

    name: str
    file: str
    line: int


def private_uses(files: list[SourceFile]) -> list[PrivateUse]:
    """Every use of a private name that the files of the package do not define, by file and line."""
    defined = {name for file in files for name in _defined(file.tree)}
    defined |= {f"{name}Backward" for name in defined}  # autograd's name for the graph node of a Function
    uses = {
        PrivateUse(name, file.name, line)
        for file in files
        for name, line in _mentioned(file.tree)
        if name not in defined and name not in _PYTHONS and not name.startswith("_foreach_")
    }
    return sorted(uses, key=lambda use: (use.file, use.line, use.name))


def is_table(file_name: str) -> bool:
    """Whether a file is a guarded table of private symbols."""
    stem = file_name.rpartition("/")[2].removesuffix(".py")
    return stem.startswith("private_") or stem.endswith("_private") or stem == "private"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own_object(node.value):
            yield node.attr


def _is_own_object(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _mentioned(tree: ast.Module) -> Iterator[tuple[str, int]]:
    text = {id(argument) for node in ast.walk(tree) for argument in _text_arguments(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in text:
            if _PRIVATE.fullmatch(node.value):
                yield node.value, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith(PACKAGE):
            parts = (node.module or "").split(".")
            names = [*parts, *(alias.name for alias in node.names)]
            yield from ((name, node.lineno) for name in names if _PRIVATE.fullmatch(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((name, node.lineno) for name in names if _PRIVATE.fullmatch(name))


def _text_arguments(node: ast.AST) -> list[ast.expr]:
    """Strings that name no attribute: parts of f-strings, and arguments of methods such as ``str.endswith``."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(node, ast.Call) and isinstance(called, ast.Attribute) and called.attr in _TEXT_METHODS:
        return node.args
    return []
