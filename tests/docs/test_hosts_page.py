"""Runs the recipes of docs/hosts.md, each after the shared definitions at the top of the page."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
FENCED = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("number", range(1, len(FENCED)))
def test_every_recipe_runs(number, tmp_path, monkeypatch):
    code = FENCED[number]
    for package in re.findall(r"^# requires: (.*)$", code, re.MULTILINE):
        for name, _, version in (entry.partition(" ") for entry in package.split(", ")):
            pytest.importorskip(name, minversion=version or None)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # the variables of torchrun, for one process
    module = types.ModuleType("hosts")
    monkeypatch.setitem(sys.modules, "hosts", module)
    for block in (FENCED[0], code):
        exec(compile(block, str(PAGE), "exec"), vars(module))
    objects = [value for value in vars(module).values() if not isinstance(value, type)]
    networks = [value for value in objects if isinstance(value, torch.nn.Module)]
    assert all(bool(param.isfinite().all()) for network in networks for param in network.parameters())
    counts = [value.num_updates for value in objects if hasattr(value, "num_updates")]
    assert all(counts)
