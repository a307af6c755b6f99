"""How `benchmarks.house` counts, on trees of a few lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.house.__main__ import survey
from benchmarks.house.private_symbols import private_uses
from benchmarks.house.probe import CallRecorder, inheritance
from benchmarks.house.sources import constructors, forwarders, function_lengths, import_circles, source_files
from benchmarks.house.trees import ROOT, run_probe, worktree


@pytest.fixture
def tree(tmp_path):
    """Make a tree from files of the package."""

    def make(**sources):
        for name, text in sources.items():
            path = tmp_path / "lightning_bayes" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return source_files(tmp_path)

    return make


def test_lengths_are_those_of_a_counted_example(tree):
    files = tree(one="def f():\n    '''Doc.'''\n\n    return 1\n", two="x = 1\n")
    assert [len(file.lines) for file in files] == [4, 1]
    assert function_lengths(files) == [4]


def test_mapped_directories_are_counted_once_and_not_through_the_links(tmp_path):
    (tmp_path / "lightning_bayes").mkdir()
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "lenet.py").write_text("")
    (tmp_path / "lightning_bayes" / "zoo").symlink_to("../zoo")
    assert [(file.name, file.module) for file in source_files(tmp_path)] == [
        ("zoo/lenet.py", "lightning_bayes.zoo.lenet")
    ]


def test_fields_of_an_unpacked_record_are_no_arguments(tree):
    source = """
class Optimizer:
    def __init__(self, params, /, lr, *, seed, **fields: Unpack[Fields]): ...
class Quoted:
    def __init__(self, **fields: "Unpack[Fields]"): ...
class Loose:
    def __init__(self, *args, **kwargs): ...
"""
    assert {each.name: each.own for each in constructors(tree(one=source))} == {"Optimizer": 3, "Quoted": 0, "Loose": 2}


def test_a_function_of_one_call_forwards_and_one_with_a_condition_does_not(tree):
    source = """
def forwards(x):
    '''Doc.'''
    return other(x)
class Shell:
    @property
    def held(self): return self.get()
def decides(x): return other(x) if x else None
def awaits(x): other(x)
"""
    assert forwarders(tree(one=source)) == {("lightning_bayes/one.py", line) for line in (2, 6, 9)}


def test_a_circle_is_found_through_typing_and_late_imports(tree):
    files = tree(
        __init__="",
        a="from lightning_bayes.b import x",
        b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import c",
        c="def late():\n    import lightning_bayes.a",
        d="from .a import x",
    )
    assert import_circles(files) == {frozenset(f"lightning_bayes.{name}" for name in "abc")}


def test_foreign_private_names_are_found_as_attributes_strings_and_imports(tree):
    source = """
from torch.nn.modules.batchnorm import _NormBase
import torch.utils._pytree
def f(node): return node._saved_self, getattr(node, "_saved_dim", None)
"""
    assert {use.name for use in private_uses(tree(one=source))} == {"_NormBase", "_pytree", "_saved_self", "_saved_dim"}


def test_own_private_names_and_foreach_functions_are_not_foreign(tree):
    source = """
class _Own:
    def __init__(self): self._state = 1
    def _step(self): return torch._foreach_add_(x, y), self._state, self._step, record._replace(a=1)
    def is_imagenet(self, name): return name.endswith("_imagenet") or "_OwnBackward" or f"{name}_rank{name}"
"""
    assert private_uses(tree(one=source)) == []


def test_concrete_parents_and_levels_are_read_from_classes():
    class Root:
        pass

    class Middle(Root):
        pass

    class Leaf(Middle):
        pass

    found = inheritance({Root, Middle, Leaf})
    assert (found["levels"], found["deepest"], len(found["subclassed"])) == (3, ["Leaf"], 2)
    assert inheritance({Middle, Leaf})["levels"] == 2


def test_the_recorder_sees_private_functions_of_the_package_and_no_others(tmp_path):
    sources = {
        "zoo/one.py": "def f(g, h): return [g() + h() for _ in range(2)]",
        "callbacks/two.py": "def _g(): return 1",
        ".venv/three.py": "def h(): return 1",
    }
    spaces = [{} for _ in sources]
    for space, (name, text) in zip(spaces, sources.items(), strict=True):
        exec(compile(text, str(tmp_path / name), "exec"), space)
    recorder = CallRecorder(str(tmp_path))
    sys.setprofile(recorder)
    spaces[0]["f"](spaces[1]["_g"], spaces[2]["h"])
    sys.setprofile(None)
    assert sorted(recorder.calls) == [("callbacks/two.py", "_g:1"), ("zoo/one.py", "f:1")]


def test_a_probe_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "lightning_bayes").mkdir()
    (tmp_path / "lightning_bayes" / "__init__.py").write_text("raise RuntimeError('this tree is broken')")
    with pytest.raises(SystemExit, match="this tree is broken"):
        run_probe("house/probe", tmp_path)


def test_an_old_commit_is_checked_out_for_a_while():
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("no git checkout")
    with worktree("HEAD") as root:
        assert (root / "pyproject.toml").exists()
    assert not root.exists()
    with pytest.raises(SystemExit, match="no-such-commit"), worktree("no-such-commit"):
        pass


@pytest.mark.slow
def test_the_survey_of_the_working_tree_has_every_row():
    rows = {row.label: row for row in survey(ROOT)}
    assert rows["lines of the package"].budget == "31,000"
    assert any("closure" in line for line in rows["MLP, measured: files / functions of a batch"].details)


def test_a_trajectory_is_that_of_the_same_fit_again_and_not_that_of_another_method():
    first, again = (run_probe("house/fits", ROOT, "VOGN, MLP, plain") for _ in range(2))
    assert first == again
    other = run_probe("house/fits", ROOT, "Vadam, MLP, plain")
    assert len({*first.values(), *other.values()}) == 2
