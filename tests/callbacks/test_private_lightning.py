"""Private symbols of Lightning appear in one table, which is checked before a fit; syntax trees reveal other uses."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import lightning
import pytest
from tiny_training import Classifier, loader, quiet_trainer

from lightning_bayes import VOGNCallback
from lightning_bayes.callbacks import private_lightning
from lightning_bayes.errors import UnsupportedTrainingError

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "callbacks" / "private_lightning.py"
USERS = ("callbacks", "zoo", "lightning_bayes/strategies", "lightning_bayes/cli.py", "lightning_bayes/demo.py")


@cache
def private_names_of_lightning():
    """Attributes and functions with a leading underscore that Lightning's sources define."""
    defined = re.compile(r"(?:def|class) (_[A-Za-z]\w*)|self\.(_[a-z]\w*)\s*[:=]")
    folder = Path(lightning.__file__).parent
    sources = [path.read_text("utf-8") for part in ("pytorch", "fabric") for path in (folder / part).rglob("*.py")]
    return {name for source in sources for pair in defined.findall(source) for name in pair if name}


def own_names(tree):
    """Private names that a file defines itself, as functions, classes or attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_uses(source, foreign):
    """Names of `foreign` that a source imports from Lightning, or reads from an object and does not define."""
    tree = ast.parse(source)
    own, found = own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        elif isinstance(node, ast.Attribute) and node.attr in foreign and node.attr not in own:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "hasattr"}:
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and a.value in foreign}
    return {name for name in found if not name.startswith("__")}


def source_files():
    for name in USERS:
        path = ROOT / name
        yield from [path] if path.suffix else path.rglob("*.py")


def test_private_symbols_of_lightning_stand_in_the_table_alone():
    foreign = private_names_of_lightning()
    assert {"_make_closure", "_should_accumulate", "_combined_loader"} <= foreign
    found = {
        str(path.relative_to(ROOT)): uses
        for path in source_files()
        if path != TABLE and (uses := private_uses(path.read_text("utf-8"), foreign))
    }
    assert not found


def test_the_table_lists_what_its_file_uses():
    listed = {method.name for method in private_lightning.METHODS} | set(private_lightning.CLOSURE_PARTS)
    listed |= {name for _, name in private_lightning.ATTRIBUTES} | {private_lightning.MODE}
    assert private_uses(TABLE.read_text("utf-8"), private_names_of_lightning()) == listed


@pytest.mark.parametrize(
    "source",
    [
        "trainer.fit_loop._combined_loader",
        "class Mine(Closure):\n    def run(self):\n        return self._step_fn()",
        "from lightning.pytorch.loops.fit_loop import _FitLoop",
        "getattr(loop, '_make_closure')",
    ],
)
def test_a_private_symbol_is_found(source):
    assert private_uses(source, private_names_of_lightning())


def test_a_missing_symbol_is_named_with_the_version(monkeypatch):
    trainer = quiet_trainer(VOGNCallback())
    monkeypatch.delattr(type(trainer.fit_loop), "_should_accumulate")
    message = rf"Lightning {lightning.__version__} .*trainer\.fit_loop\._should_accumulate is missing.*2\.5\.1 to 2\."
    with pytest.raises(UnsupportedTrainingError, match=message):
        trainer.fit(Classifier(), loader())


def test_the_tested_versions_are_those_of_the_documentation():
    assert f"lightning=={private_lightning.OLDEST_TESTED}\n" in (ROOT / "tests" / "oldest.txt").read_text("utf-8")
    rows = [
        line for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines() if line.startswith("| newest |")
    ]
    assert f"| {private_lightning.NEWEST_TESTED} |" in rows[0]
