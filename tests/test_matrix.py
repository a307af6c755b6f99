"""The range of versions: its oldest end is what pyproject.toml promises, and what is missing is named."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tiny_training import Classifier, loader, quiet_trainer

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pins():
    lines = (ROOT / "tests" / "oldest.txt").read_text("utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement.specifier for requirement in found}


def lower_bound(requirement):
    return next(Version(part.version) for part in requirement.specifier if part.operator == ">=")


@pytest.mark.parametrize("text", project()["dependencies"])
def test_the_oldest_environment_has_the_lower_bound_of_every_dependency(text):
    """In its newest patch release: torch>=2.5 is tested as 2.5.1."""
    requirement = Requirement(text)
    (pin,) = pins()[requirement.name]
    bound = lower_bound(requirement)
    assert pin.operator == "=="
    assert Version(pin.version) >= bound
    places = 2 if bound.release[1:] else 1
    assert Version(pin.version).release[:places] == bound.release[:places]


def test_the_oldest_python_is_the_one_that_is_promised():
    assert project()["requires-python"] == ">=3.10"
    assert re.search(r"^OLDEST \?= python3\.10$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("oldest", "message"),
    [
        ("no-such-python", r"needs Python 3\.10, and there is no 'no-such-python' here.*OLDEST=/path/to/python3\.10"),
        (sys.executable, r"needs Python 3\.10 for the oldest versions, '.*' is Python 3\.\d+"),
    ],
    ids=["missing", "another version"],
)
def test_an_old_interpreter_that_is_missing_is_named(oldest, message):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if oldest == sys.executable and sys.version_info[:2] == (3, 10):
        pytest.skip("this interpreter is the oldest one")
    command = ["make", "--always-make", "test-matrix", f"OLDEST={oldest}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert re.search(message, done.stderr), done.stderr
    assert "creating" not in done.stdout


def test_a_lightning_without_the_private_method_is_refused_before_anything_is_swapped(monkeypatch):
    module, trainer = Classifier(), quiet_trainer(VOGNCallback())
    monkeypatch.delattr(type(trainer.fit_loop.epoch_loop.automatic_optimization), "_make_closure")
    message = r"Lightning \d.* is not supported: .*_make_closure is missing\. Install lightning .* \(tested\)"
    with pytest.raises(UnsupportedTrainingError, match=message):
        trainer.fit(module, loader())
    assert module.training_steps == 0


def test_no_named_tuple_has_a_second_base():
    """Python 3.10 refuses it when the module is imported, and neither ruff nor mypy does."""
    for path in [
        p for room in ("lightning_bayes", "callbacks", "zoo", "benchmarks") for p in (ROOT / room).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            assert "NamedTuple" not in bases or len(bases) == 1, f"{path}: {ast.unparse(node).splitlines()[0]}"
