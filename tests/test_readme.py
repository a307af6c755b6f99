"""Runs the Python blocks of the README and docs in order, and parses the arguments of their commands."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.version import Version

from lightning_bayes.cli.commands import main
from lightning_bayes.cli.composition import configs_of
from lightning_bayes.report import command as report

ROOT = Path(__file__).parents[1]
WITH_COMMANDS = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "continual",
            "decisions",
            "deployment",
            "distributed",
            "evaluation",
            "finetuning",
            "laplace",
            "methods",
            "migration",
            "start",
        )
    ),
]
WITH_BLOCKS = [*WITH_COMMANDS, "docs/coverage.md", "docs/defaults.md", "docs/index.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int  # line number of its first line of code, from 1
    code: str


def blocks(text, *languages):
    fenced = [Block(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in FENCE.finditer(text)]
    return [block for block in fenced if block.language in languages]


def commands(text):
    """Arguments of every `lightning-bayes` command in shell blocks."""
    lines = "\n".join(block.code.replace("\\\n", " ") for block in blocks(text, "bash", "sh", "console")).splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["lightning-bayes"]]


def config_of(arguments):
    """Value of --config or -c, or None."""
    for position, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option in {"--config", "-c"}:
            return value or "".join(arguments[position + 1 : position + 2])
    return None


def is_runnable(block):
    """Whether torch meets the block's ``# requires: torch 2.6`` line, if there is one."""
    needed = re.findall(r"^# requires: torch (\S+)$", block.code, re.MULTILINE)
    return all(Version(torch.__version__) >= Version(least) for least in needed)


def run(block, namespace, name):
    exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)  # errors report the line in the README


def is_own_run(config):
    return config.startswith("runs/")  # written by an earlier command of the page


# Lightning's warnings about short examples and about a missing TensorBoard.
@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed:UserWarning")
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # the __module__ of its classes
    shown = blocks((ROOT / page).read_text("utf-8"), "python")
    assert shown
    for block in filter(is_runnable, shown):
        run(block, vars(module), str(ROOT / page))


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_name_packaged_configs(page):
    shown = commands((ROOT / page).read_text("utf-8"))
    assert shown
    named = {config for arguments in shown if (config := config_of(arguments)) is not None}
    assert named
    for name in sorted(name for name in named if not is_own_run(name)):
        assert configs_of(name)  # raises for an unknown name


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_parse(page, monkeypatch):
    for arguments in commands((ROOT / page).read_text("utf-8")):
        if is_own_run(config_of(arguments) or ""):
            continue
        if arguments[0] == "report":
            assert report.parser().parse_args(arguments[1:]).runs
            continue
        monkeypatch.setattr(sys, "argv", ["lightning-bayes", *arguments, "--print_config"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0, f"lightning-bayes {shlex.join(arguments)}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1200


EXAMPLE = """
# Title

```python
a = 1
```

```bash
$ lightning-bayes fit --config one.yaml  # a comment
pip install lightning-bayes
lightning-bayes test \\
    --config=two.yaml --ckpt_path 'a b.ckpt'
```

```text
lightning-bayes fit --config three.yaml
```

```python
b = a / 0
```
"""


def test_blocks_are_found_with_their_lines():
    assert blocks(EXAMPLE, "python") == [Block("python", 5, "a = 1\n"), Block("python", 20, "b = a / 0\n")]


def test_an_error_in_a_block_points_at_its_line():
    namespace = {}
    first, second = blocks(EXAMPLE, "python")
    run(first, namespace, "README.md")
    with pytest.raises(ZeroDivisionError) as error:
        run(second, namespace, "README.md")
    assert error.traceback[-1].path.name == "README.md"
    assert error.traceback[-1].lineno + 1 == 20


def test_commands_are_found_in_shell_blocks():
    found = commands(EXAMPLE)
    assert found == [
        ["fit", "--config", "one.yaml"],
        ["test", "--config=two.yaml", "--ckpt_path", "a b.ckpt"],
    ]
    assert [config_of(arguments) for arguments in [*found, ["--help"]]] == ["one.yaml", "two.yaml", None]
