import subprocess
import sys

import pytest

from benchmarks.house.batch_path import Stop, batch_stops
from benchmarks.house.batch_probe import CallRecorder
from benchmarks.house.class_probe import inheritance
from benchmarks.house.constructors import constructors
from benchmarks.house.prior_strength import prior_strengths
from benchmarks.house.private_symbols import private_uses
from benchmarks.house.sources import file_lengths, function_lengths, lengths, source_files
from benchmarks.trees import ROOT, run_probe, worktree


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
    assert (file_lengths(files).largest, file_lengths(files).median) == (4, 2.5)
    assert function_lengths(files).largest == 4


def test_the_95th_percentile_is_not_exceeded_by_95_percent():
    assert lengths(list(range(1, 101))).p95 == 95
    assert lengths([7]).p95 == 7


def test_mapped_directories_are_counted_once_and_not_through_the_links(tmp_path):
    (tmp_path / "lightning_bayes").mkdir()
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "lenet.py").write_text("")
    (tmp_path / "lightning_bayes" / "zoo").symlink_to("../zoo")
    assert [file.name for file in source_files(tmp_path)] == ["zoo/lenet.py"]


def test_fields_of_an_unpacked_record_are_counted_apart(tree):
    source = """
class Base(TypedDict):
    a: int
class Fields(Base, total=False):
    b: int
    c: int
class Optimizer:
    def __init__(self, params, /, lr, *, seed, **fields: Unpack[Fields]): ...
class Quoted:
    def __init__(self, **fields: "Unpack[Fields]"): ...
class Loose:
    def __init__(self, *args, **kwargs): ...
"""
    found = {each.name: (each.own, each.unpacked) for each in constructors(tree(one=source))}
    assert found == {"Optimizer": (3, 3), "Quoted": (0, 3), "Loose": (2, 0)}


@pytest.mark.parametrize(
    "source",
    [
        "x = kl_weight * prior_precision / num_data",
        "x = prior_precision / num_data * kl_weight",
        "x = prior_precision / (num_data / kl_weight)",
        "x = group['prior_precision'] * group['kl_weight'] / (rho * group['num_data'])",
        "def f(self):\n    scale = self.num_data / self.kl_weight_now\n    return self.prior_precision / scale",
        "def f(e):\n    return e.prior_precision / e.scale",
        "def f(tau, delta, num_data):\n    return 1 + tau * delta / num_data",
        "def f(group):\n    n, t = group['num_data'], group['kl_weight']\n    return abs(group['prior_precision']) * t / n",
    ],
)
def test_the_strength_of_the_prior_is_found_in_any_order(tree, source):
    assert len(prior_strengths(tree(one=source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x = num_data * prior_precision / kl_weight",
        "x = kl_weight * prior_precision",
        "x = num_data / kl_weight",
        "x = curvature * num_data / kl_weight + prior_precision",
        "def f(e):\n    return e.prior * e.mean",
    ],
)
def test_other_products_are_no_strength_of_the_prior(tree, source):
    assert prior_strengths(tree(one=source)) == []


def test_using_a_local_strength_is_no_second_place(tree):
    source = "def f(tau, delta, num_data, mean):\n    strength = tau * delta / num_data\n    return strength * mean / 2"
    assert len(prior_strengths(tree(one=source))) == 1


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


def test_a_stop_is_a_function_that_another_file_enters():
    calls = [
        ("a.py", "A.run", 1, ""),
        ("a.py", "A.helper", 5, "a.py"),
        ("b.py", "B._hook", 1, "a.py"),
        ("lightning_bayes/curvature/fused.py", "Engine.capture", 1, "b.py"),
        ("c.py", "saved_by", 1, "lightning_bayes/curvature/fused.py"),
    ]
    assert batch_stops(calls) == [Stop("a.py", "A.run"), Stop("b.py", "B._hook")]
    assert [stop.is_public for stop in batch_stops(calls)] == [True, False]


def test_the_recorder_sees_functions_of_the_package_and_their_callers(tmp_path):
    sources = {
        "zoo/one.py": "def f(g, h): return [g() + h() for _ in range(2)]",
        "callbacks/two.py": "def g(): return 1",
        ".venv/three.py": "def h(): return 1",
    }
    spaces = [{} for _ in sources]
    for space, (name, text) in zip(spaces, sources.items(), strict=True):
        exec(compile(text, str(tmp_path / name), "exec"), space)
    recorder = CallRecorder(str(tmp_path))
    sys.setprofile(recorder)
    spaces[0]["f"](spaces[1]["g"], spaces[2]["h"])
    sys.setprofile(None)
    assert sorted(recorder.calls) == [("callbacks/two.py", "g", 1, "zoo/one.py"), ("zoo/one.py", "f", 1, "")]


def test_a_probe_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "lightning_bayes").mkdir()
    (tmp_path / "lightning_bayes" / "__init__.py").write_text("raise RuntimeError('this tree is broken')")
    with pytest.raises(SystemExit, match="this tree is broken"):
        run_probe("house/class_probe", tmp_path)


def test_an_old_commit_is_checked_out_for_a_while():
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("no git checkout")
    with worktree("HEAD") as root:
        assert (root / "pyproject.toml").exists()
    assert not root.exists()
    with pytest.raises(SystemExit, match="no-such-commit"), worktree("no-such-commit"):
        pass


@pytest.mark.slow
def test_one_batch_passes_the_closure_and_the_step():
    calls = [tuple(call) for call in run_probe("house/batch_probe", ROOT)]
    names = {stop.function for stop in batch_stops(calls)}
    assert any(name.endswith("closure") for name in names)
    assert any(name.endswith(".step") for name in names)
