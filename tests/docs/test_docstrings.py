"""Docstrings as documentation tools read them: equations and tables stay blocks, with every space where it was written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALIGNED = re.compile(r"\S {3,}\S")  # spaces that a paragraph would lose
FILES = sorted({path.resolve() for room in ("lightning_bayes", "benchmarks") for path in (ROOT / room).rglob("*.py")})


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)  # without the margin that all lines share
            if text:
                yield getattr(node, "name", "the module"), text


def broken(text):
    """Lines with aligned columns that are not indented, and so would be rendered as words of a paragraph."""
    return [line for line in text.splitlines() if ALIGNED.search(line) and not line.startswith("    ")]


@pytest.mark.parametrize("room", sorted({path.relative_to(ROOT).parts[0] for path in FILES}))
def test_equations_are_indented(room):
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == room]
    found = [(path.name, name, broken(text)) for path in files for name, text in docstrings(path) if broken(text)]
    assert found == []


def test_equations_are_rendered_as_code():
    markdown = pytest.importorskip("markdown")
    text = "Title.\n\n    a = b        c = d\n\nWords."
    assert broken(text) == []
    assert "<pre><code>a = b        c = d\n</code></pre>" in markdown.markdown(text)
    lost = text.replace("    a", "a")
    assert broken(lost) == ["a = b        c = d"]
    assert "<pre>" not in markdown.markdown(lost)


def test_no_method_only_points_to_its_base():
    """`typing_extensions.override` says it, and a type checker checks it."""
    pointer = re.compile(r"See `[\w.]+`\.")
    found = [
        f"{path.name}: {cls.name}.{method.name}"
        for path in FILES
        for cls in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and pointer.fullmatch(ast.get_docstring(method) or "")
    ]
    assert found == []
