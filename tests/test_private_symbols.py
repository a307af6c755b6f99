"""Private symbols of other packages stand in one table each; a missing one is named with its library's version."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.house.private_symbols import is_table, private_uses
from benchmarks.house.sources import SourceFile, source_files
from lightning_bayes import private_torch
from lightning_bayes.curvature import private_backpack
from lightning_bayes.errors import UnsupportedTrainingError

ROOT = Path(__file__).parents[1]


def test_private_symbols_stand_in_the_tables_alone():
    found = [use for use in private_uses(source_files(ROOT)) if not is_table(use.file)]
    assert not found, "\n".join(f"{use.file}:{use.line}: {use.name}" for use in found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.nn.modules.batchnorm import _NormBase",
        "from torch.utils._pytree import tree_map",
        "torch._C._current_graph_task_id()",
        "layer._parameters",
        "trainer.fit_loop._combined_loader",
        "getattr(node, '_saved_dim', None)",
        "setattr(module, '_is_full_backward_hook', None)",
        "extension._BackpropExtension__module_extensions",
    ],
)
def test_a_private_symbol_is_found(source, tmp_path):
    path = tmp_path / "lightning_bayes" / "stranger.py"
    path.parent.mkdir()
    path.write_text(source)
    assert private_uses([SourceFile(path, tmp_path)])


def test_functions_on_lists_of_tensors_are_excepted(tmp_path):
    (tmp_path / "step.py").write_text("torch._foreach_mul_(tensors, 2.0)")
    assert not private_uses([SourceFile(tmp_path / "step.py", tmp_path)])


def test_a_missing_symbol_of_torch_is_named_with_the_version():
    attributes = (("torch.nn.Module", nn.Module(), ("_parameters", "_gone")),)
    name = re.escape(f"PyTorch {torch.__version__} is not supported: torch.nn.Module._gone is missing")
    message = rf"{name}.*torch 2\.5\.1"
    with pytest.raises(UnsupportedTrainingError, match=message):
        private_torch.check_private_symbols(attributes)


@pytest.mark.parametrize(
    "read", [lambda: private_backpack.supported_layers(SimpleNamespace()), private_backpack.hook_handles]
)
def test_a_missing_symbol_of_backpack_is_named_with_the_version(read, monkeypatch):
    monkeypatch.setattr(private_backpack, "CTX", SimpleNamespace())
    name = r"_BackpropExtension__module_extensions|hook_handles"
    with pytest.raises(UnsupportedTrainingError, match=rf"BackPACK .* not supported: .*({name}) is missing.*1\.7\.1"):
        read()


def test_the_tested_versions_are_those_of_the_documentation():
    assert f"torch=={private_torch.OLDEST_TESTED}\n" in (ROOT / "tests" / "oldest.txt").read_text("utf-8")
    rows = [
        line for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines() if line.startswith("| newest |")
    ]
    assert f"| {private_torch.NEWEST_TESTED} |" in rows[0]
    assert version("backpack-for-pytorch") == private_backpack.TESTED


def test_what_the_table_offers_is_used():
    """A symbol that nobody needs any more leaves the table."""
    text = "".join(file.text for file in source_files(ROOT) if not is_table(file.name))
    functions = [
        node.name
        for table in (private_torch, private_backpack)
        for node in ast.parse(Path(table.__file__).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "check_"))
    ]
    assert not [name for name in functions if f"{name}(" not in text and f"{name}," not in text]
