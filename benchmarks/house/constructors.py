"""The arguments that constructors take, explicit ones and those of an unpacked TypedDict."""

from __future__ import annotations

import ast
from typing import NamedTuple

from benchmarks.house.sources import SourceFile


class Constructor(NamedTuple):
    """An ``__init__`` as it is written.

    Attributes:
        name: The class.
        own: Number of arguments besides ``self``. ``*args`` and ``**kwargs`` are one each, ``**x: Unpack[...]`` is none.
        unpacked: Number of fields that ``**fields: Unpack[...]`` brings.
    """

    name: str
    own: int
    unpacked: int


def constructors(files: list[SourceFile]) -> list[Constructor]:
    """Read every ``__init__`` that is written out.

    Constructors that dataclasses and named tuples generate are not counted: they are records with one line per field.

    Args:
        files: The source files.

    Returns:
        The constructors, the one with most arguments first.
    """
    classes = {node.name: node for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)}
    found = [
        _constructor(node.name, method, classes)
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    ]
    return sorted(found, key=lambda each: (-each.own, -each.unpacked, each.name))


def _constructor(name: str, method: ast.FunctionDef, classes: dict[str, ast.ClassDef]) -> Constructor:
    arguments = method.args
    named = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
    own = named + (arguments.vararg is not None)
    if arguments.kwarg is None:
        return Constructor(name, own, 0)
    record = _unpacked_record(arguments.kwarg.annotation)
    if record is None:
        return Constructor(name, own + 1, 0)
    return Constructor(name, own, len(_fields(record, classes)))


def _unpacked_record(annotation: ast.expr | None) -> str | None:
    """Return the class in ``Unpack[Class]``, also where the annotation is a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] == "Unpack":
        return ast.unparse(annotation.slice).rpartition(".")[2]
    return None


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    if name not in classes:
        return set()
    node = classes[name]
    own = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    bases = (ast.unparse(base).rpartition(".")[2] for base in node.bases)
    return own.union(*(_fields(base, classes) for base in bases))
