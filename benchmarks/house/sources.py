"""Source files of a tree, and what their syntax trees say: lengths, constructors, forwarders, circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGE = "lightning_bayes"
MAPPED = ("callbacks", "zoo", "configs")  # real directories at the root, links inside the package


class SourceFile:
    """One Python file of the package; ``name`` is its path from the root of the tree."""

    def __init__(self, path: Path, root: Path) -> None:
        self.name = path.relative_to(root).as_posix()
        self.text = path.read_text("utf-8")

    @property
    def lines(self) -> list[str]:
        """All lines, with docstrings, comments and blank lines."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The import path: ``zoo/models/lenet.py`` is ``lightning_bayes.zoo.models.lenet``."""
        parts = self.name.removesuffix(".py").removesuffix("/__init__").split("/")
        return ".".join(parts if parts[0] == PACKAGE else [PACKAGE, *parts])

    def imported(self) -> Iterator[tuple[str, str]]:
        """Every import of the file, at the top, inside functions or for typing, as pairs of a module and a name in it."""
        package = self.module.split(".") if self.name.endswith("__init__.py") else self.module.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parent = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*parent, *filter(None, [node.module])])
                yield from ((base, alias.name) for alias in node.names)


class Constructor(NamedTuple):
    """An ``__init__`` and the number of its arguments, without ``self`` and the fields of an unpacked record."""

    name: str
    own: int


def source_files(root: Path) -> list[SourceFile]:
    """Every Python file that the wheel of the tree at `root` installs, sorted by path."""
    package = root / PACKAGE
    own = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in MAPPED]
    mapped = [path for name in MAPPED for path in (root / name).rglob("*.py")]
    return [SourceFile(path, root) for path in sorted([*own, *mapped])]


def function_lengths(files: list[SourceFile]) -> list[int]:
    """Lengths of functions from ``def`` to the end, with docstrings, comments and blank lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for file in files for node in ast.walk(file.tree) if isinstance(node, kinds)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def forwarders(files: list[SourceFile]) -> set[tuple[str, int]]:
    """Functions whose whole body is one call of another, as file and first line, decorators included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ((file.name, node) for file in files for node in ast.walk(file.tree) if isinstance(node, kinds))
    return {(name, min([node, *node.decorator_list], key=_line).lineno) for name, node in nodes if _only_calls(node)}


def _line(node: ast.stmt | ast.expr) -> int:
    return node.lineno


def _only_calls(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return len(body) == 1 and isinstance(body[0], (ast.Return, ast.Expr)) and isinstance(body[0].value, ast.Call)


def constructors(files: list[SourceFile]) -> list[Constructor]:
    """Every explicit ``__init__``, not those of dataclasses and named tuples; the one with the most arguments first."""
    explicit = [
        Constructor(node.name, _arguments(method.args))
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    ]
    return sorted(explicit, key=lambda constructor: (-constructor.own, constructor.name))


def _arguments(arguments: ast.arguments) -> int:
    named = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
    kwarg = arguments.kwarg
    is_record = kwarg is not None and kwarg.annotation is not None and "Unpack[" in ast.unparse(kwarg.annotation)
    return named + (arguments.vararg is not None) + (kwarg is not None and not is_record)


def import_circles(files: list[SourceFile]) -> set[frozenset[str]]:
    """The largest sets of modules each of which imports, over some path, every other one."""
    modules = {file.module for file in files}
    arrows = {file.module: _targets(file, modules) for file in files}
    reached = {module: _reachable(module, arrows) for module in modules}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in modules
        if module in reached[module]
    }


def _targets(file: SourceFile, modules: set[str]) -> set[str]:
    named = (f"{base}.{name}" if f"{base}.{name}" in modules else base for base, name in file.imported())
    return {module for module in named if module in modules and module != file.module}


def _reachable(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(arrows[start])
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += arrows[module]
    return found
