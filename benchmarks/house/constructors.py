"""Arguments of constructors: explicit ones, and fields of an unpacked TypedDict."""

from __future__ import annotations

import ast
from typing import NamedTuple

from benchmarks.house.sources import SourceFile


class Constructor(NamedTuple):
    """The arguments of an ``__init__``.

    Attributes:
        name: The class.
        own: Number of arguments without ``self``. ``*args`` and ``**kwargs`` count as one each, ``**x: Unpack[...]`` as
        none. unpacked: Number of fields that ``**fields: Unpack[...]`` adds.
    """

    name: str
    own: int
    unpacked: int


def constructors(files: list[SourceFile]) -> list[Constructor]:
    """Every explicit ``__init__``, not those of dataclasses and named tuples; the one with the most arguments first."""
    classes = {node.name: node for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)}
    explicit = [
        _constructor(node.name, method, classes)
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    ]
    return sorted(explicit, key=lambda constructor: (-constructor.own, -constructor.unpacked, constructor.name))


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
    """The class in ``Unpack[Class]``; the annotation can be a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] == "Unpack":
        return ast.unparse(annotation.slice).rpartition(".")[2]
    return None


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    if name not in classes:
        return set()
    node = classes[name]
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    bases = (ast.unparse(base).rpartition(".")[2] for base in node.bases)
    return fields.union(*(_fields(base, classes) for base in bases))
