"""The arrows between the rooms and the size of files and functions, read from the syntax trees.

The rooms are the entries of ``lightning_bayes/``; ``callbacks``, ``zoo`` and ``configs`` are real directories at the
root of the repository and are imported as ``lightning_bayes.callbacks`` and so on.
"""

from __future__ import annotations

import ast
import inspect
import statistics
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import OPTIMIZERS, classifier, construct

from benchmarks.house.probe import own_classes
from benchmarks.house.sources import constructors, import_circles
from benchmarks.house.sources import source_files as house_files
from benchmarks.house.trees import run_probe
from lightning_bayes.errors import BayesError
from lightning_bayes.optim.hyperparameters import HostSettings, OptimizerFields
from lightning_bayes.optim.settings import declaration_of

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_bayes"
MAPPED = ("callbacks", "zoo", "configs")

CORE = {
    "errors",
    "private_torch",
    "linalg",
    "likelihood",
    "posteriors",
    "curvature",
    "optim",
    "posthoc",
    "predictive",
    "metrics",
}
SHELL = {"report", "cli", "predictor"}
EVERYTHING = {PACKAGE, *CORE, *SHELL, "strategies", "callbacks", "zoo", "configs"}
ARROWS = {  # room: the rooms it may import, beside itself
    "errors": set(),
    "private_torch": {"errors"},
    "linalg": {"errors"},
    "likelihood": {"private_torch", "errors"},
    "posteriors": {"private_torch", "linalg", "errors"},
    "curvature": {"private_torch", "likelihood", "errors"},
    "optim": {"private_torch", "posteriors", "curvature", "likelihood", "linalg", "errors"},
    "posthoc": {"private_torch", "posteriors", "curvature", "likelihood", "linalg", "predictive", "errors"},
    "predictive": {"private_torch", "posteriors", "curvature", "likelihood", "errors"},
    "metrics": {"errors"},
    "strategies": {"private_torch", "optim", "errors"},
    "callbacks": CORE | {"strategies"},
    "zoo": CORE,
    "configs": set(),
    "report": {"metrics", "errors"},
    PACKAGE: {*EVERYTHING, "public"},  # lightning_bayes/__init__.py, which gathers the public names
    "predictor": {"likelihood", "posteriors", "predictive", "zoo", "cli", "errors"},
    "cli": EVERYTHING,
    "public": EVERYTHING,  # the names of lightning_bayes/__init__.py
    "__main__": {"cli"},
}
CALLBACK_ROOMS = {  # room of callbacks/: the rooms and the callbacks beside them that it may import
    "trainer": set(),
    "evaluation": {"trainer", "recalibration"},
    "fit": {"trainer", "evaluation"},
    "calibrating": {"trainer", "evaluation", "recalibration"},
    "posthoc": {"trainer", "evaluation", "fit", "calibration"},
    "ensembles": {"trainer", "evaluation", "fit", "base", "calibration", "recalibration"},
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
MAY_IMPORT_LIGHTNING = {"strategies", "callbacks", "zoo", "cli"}
SUBCLASSED: dict[str, str] = {}  # concrete classes that others inherit from, with the reason
LONG = 300  # lines of a file
BATCH = {  # files and functions that a VOGN batch passes: lowered with the code, never raised; goals in benchmarks.house
    "MLP, measured": (26, 109),
    "MLP, not measured": (13, 41),
    "LeNet, measured": (31, 123),
    "LeNet, not measured": (13, 41),
}
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}


def source_files():
    real = ROOT / PACKAGE
    own = [
        path for path in real.rglob("*.py") if path.relative_to(real).parts[0] not in MAPPED
    ]  # not through the links
    return sorted([*own, *(path for name in MAPPED for path in (ROOT / name).rglob("*.py"))])


def python_files():
    return [*source_files(), *sorted(path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py"))]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = (PACKAGE, *parts) if parts[0] in MAPPED else parts
    return ".".join(parts)  # a package keeps its trailing .__init__, so that its parent is itself


def imports(source, module):
    """All modules that a source imports, by absolute name; names imported from a package count as its submodules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, module)
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {
            "import_module",
            "__import__",
        }:
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return found


def absolute_base(node, module):
    if not node.level:
        return node.module
    parent = module.split(".")[: -node.level]
    return ".".join([*parent, node.module] if node.module else parent)


def room(module):
    """``lightning_bayes.optim.diagonal.vogn`` lies in ``optim``; ``lightning_bayes.VOGN`` in ``lightning_bayes`` itself."""
    entry = f"{module}.".split(".")[1]
    return entry if entry in ARROWS else PACKAGE


def violations(source, module):
    here = room(module)
    return sorted(line for name in imports(source, module) if (line := complaint(here, module, name)))


def complaint(here, module, name):
    top = name.partition(".")[0]
    if top == PACKAGE and room(name) not in ARROWS[here] | {here}:
        return f"{module} imports {name}, but {here} may import only {sorted(ARROWS[here]) or 'nothing of ours'}"
    if top == "backpack" and here != "curvature":
        return f"{module} imports {name}; only curvature may import BackPACK"
    if top in LIGHTNING and here not in MAY_IMPORT_LIGHTNING:
        return f"{module} imports {name}; only {sorted(MAY_IMPORT_LIGHTNING)} may import Lightning"
    return None


def body_lines(function, source_lines):
    """Code lines of a function's body: no docstring, no comments, no blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    lines = source_lines[function.body[-len(body)].lineno - 1 : function.end_lineno]
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)


def function_sizes(source):
    lines = source.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [body_lines(node, lines) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def test_imports_follow_the_arrows():
    found = [line for path in source_files() for line in violations(path.read_text("utf-8"), module_name(path))]
    assert not found, "\n".join(found)


def callbacks_imported(path):
    """The rooms of callbacks/, and the files beside them, that a file imports, other than its own room."""
    prefix = f"{PACKAGE}.callbacks."
    found = {
        name.removeprefix(prefix).partition(".")[0]
        for name in imports(path.read_text("utf-8"), module_name(path))
        if name.startswith(prefix)
    }
    return found - {path.parent.name}


def test_the_rooms_of_callbacks_follow_their_arrows():
    rooms = {room: sorted((ROOT / "callbacks" / room).glob("*.py")) for room in CALLBACK_ROOMS}
    found = {
        path.name: extra
        for room, files in rooms.items()
        for path in files
        if (extra := callbacks_imported(path) - CALLBACK_ROOMS[room])
    }
    assert not found
    assert {path.name for path in (ROOT / "callbacks").iterdir() if (path / "__init__.py").exists()} == set(rooms)


def test_the_arrows_between_the_rooms_of_callbacks_run_one_way():
    order = list(CALLBACK_ROOMS)  # from the bottom up
    assert not [
        (room, other)
        for room, allowed in CALLBACK_ROOMS.items()
        for other in allowed & {*order}
        if order.index(other) >= order.index(room)
    ]


def test_every_room_has_its_arrows():
    entries = {module_name(path).split(".")[1] for path in source_files()} - {"__init__"}
    assert entries <= set(ARROWS), f"new rooms {sorted(entries - set(ARROWS))}: say in ARROWS what they may import"


def test_nobody_imports_the_mapped_directories_by_their_own_names():
    found = {
        module_name(path): sorted(wrong)
        for path in python_files()
        if (
            wrong := {
                name for name in imports(path.read_text("utf-8"), module_name(path)) if name.split(".")[0] in MAPPED
            }
        )
    }
    assert not found, (
        f"a second import path makes every class exist twice; import lightning_bayes.zoo and so on: {found}"
    )


def test_file_names_say_what_is_inside():
    assert not [path for path in python_files() if path.name in VAGUE_NAMES]


def test_files_are_small():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in source_files()}
    assert statistics.median(lengths.values()) < 200
    found = {path.relative_to(ROOT).as_posix() for path, length in lengths.items() if length > LONG}
    assert not found, f"split the files over {LONG} lines"


def test_files_do_not_import_each_other_in_circles():
    """Typing imports and imports inside functions count as well."""
    circles = import_circles(house_files(ROOT))
    found = {tuple(sorted(name.removeprefix(f"{PACKAGE}.") for name in circle)) for circle in circles}
    assert not found, "move what both sides need into a third file"


def test_a_batch_passes_few_files_and_functions():
    for name, calls in run_probe("house/probe", ROOT)["batches"].items():
        files, functions = len({file for file, _ in calls}), len(calls)
        assert files <= BATCH[name][0], f"a batch, {name}, passes {files} files"
        assert functions <= BATCH[name][1], f"a batch, {name}, passes {functions} functions"


def test_one_file_looks_for_the_other_callbacks_of_a_trainer():
    found = [path.name for path in source_files() if "trainer.callbacks  #" in path.read_text("utf-8")]
    assert found == ["neighbours.py"]


def test_functions_are_small():
    assert statistics.median([size for path in source_files() for size in function_sizes(path.read_text("utf-8"))]) < 12


def keys_of_optimizers():
    """The names under which optimizers keep hyperparameters and state: the schema's, and those seen after an update."""
    keys = set(declaration_of(OptimizerFields, HostSettings).settings)
    for optimizer_class in OPTIMIZERS:
        model = classifier(optimizer_class)
        optimizer = construct(optimizer_class, model)
        with optimizer.sampled_params():
            F.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
        keys |= {key for held in (*optimizer.param_groups, *optimizer.state.values()) for key in held}
    return keys | {"param_groups", "state", "optimizer_states", "state_dict", "callbacks"}  # of checkpoints


def looked_up(source):
    """String keys that a source reads: ``x["key"]``, ``x.get("key")``, ``x.pop("key")``, ``"key" in x``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keys = node.args[:1] if node.func.attr in {"get", "pop", "setdefault"} else []
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            keys = [node.left]
        else:
            keys = []
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def test_posteriors_read_no_key_of_an_optimizer():
    """Posteriors take numbers; `optim.readout` looks them up in groups, states and checkpoints."""
    keys = keys_of_optimizers() - {"posterior"}  # also a key of posterior files
    assert {
        "prior_precision",
        "kl_weight",
        "noisy",
        "curvature",
        "joint_curvature",
        "input_factor",
        "initial_rms",
    } <= keys
    found = {
        path.name: set(looked_up(path.read_text("utf-8"))) & keys
        for path in (ROOT / PACKAGE / "posteriors").rglob("*.py")
    }
    assert not {name: sorted(read) for name, read in found.items() if read}


def test_lookups_are_found():
    source = 'group["lr"], state.get("scale", 1), "noisy" in state, group[name], {"mean": 1}'
    assert set(looked_up(source)) == {"lr", "scale", "noisy"}


@pytest.fixture(scope="module")
def classes():
    """The package's classes beside errors and records of plain data."""
    return {cls for cls in own_classes() if not issubclass(cls, (BayesError, tuple, dict))}


def levels(cls, classes):
    """Length of the longest chain of own classes that ends in `cls`."""
    return 1 + max((levels(base, classes) for base in cls.__bases__ if base in classes), default=0)


def test_inheritance_is_shallow(classes):
    deep = {f"{cls.__module__}.{cls.__name__}": depth for cls in classes if (depth := levels(cls, classes)) > 3}
    assert not deep, "compose instead of inheriting"


def test_concrete_classes_are_final(classes):
    parents = {base for cls in classes for base in cls.__bases__ if base in classes}
    concrete = {
        cls.__name__ for cls in parents if not inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False)
    }
    assert not concrete - set(SUBCLASSED), "make the parent abstract, or say in SUBCLASSED why not"


def test_constructors_take_few_arguments():
    """Fields of a shared record, ``**fields: Unpack[...]``, count once, where they are declared."""
    assert not {each.name: each.own for each in constructors(house_files(ROOT)) if each.own > 12}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("posteriors.gaussian", "from lightning_bayes.curvature import measure"),
        ("posteriors.gaussian", "from lightning_bayes import curvature"),
        ("posteriors.gaussian", "from lightning_bayes import VOGN"),
        ("posteriors.gaussian", "from ..optim.vogn import VOGN"),
        ("posteriors.__init__", "from .. import optim"),
        ("posteriors.gaussian", "def late():\n    import lightning_bayes.optim.diagonal.vogn"),
        ("posteriors.gaussian", "importlib.import_module('lightning_bayes.optim')"),
        ("errors", "import lightning_bayes.linalg"),
        ("callbacks.vogn", "from lightning_bayes.zoo.models import LeNet"),
        ("zoo.tasks.classifier", "from lightning_bayes.callbacks import VOGNCallback"),
        ("optim.diagonal.vogn", "import backpack"),
        ("metrics.figures", "from lightning.pytorch import Callback"),
        ("__init__", "import lightning"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert violations(source, f"{PACKAGE}.{module}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "posteriors.gaussian",
            "from lightning_bayes.errors import ShapeError\nfrom .prior import Gaussian\nimport torch",
        ),
        ("posteriors.__init__", "from .gaussian import MeanField"),
        ("curvature.backpack_engine", "from backpack import extend"),
        ("callbacks.vogn", "from lightning.pytorch import Callback\nfrom lightning_bayes.optim import VOGN"),
        ("cli.demo", "from lightning_bayes import VOGNCallback"),
        ("__init__", "from lightning_bayes.callbacks import VOGNCallback"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert violations(source, f"{PACKAGE}.{module}") == []


def test_sizes_count_code_without_docstring_comments_and_blank_lines():
    source = '''
        def documented():
            """Only a docstring."""

        def two_lines(x):
            """One line.

            Another.
            """
            # a comment

            y = x
            return y
    '''
    assert function_sizes(textwrap.dedent(source)) == [0, 2]
