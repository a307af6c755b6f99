"""Runs the tutorials, and turns each of them into a page with its outputs and figures.

    python -m docs.site.tutorials [NAME ...] [--out FOLDER]

A tutorial is a Python file of cells: ``# %%`` starts code, ``# %% [markdown]`` starts text in comments. A line
``# requires: PACKAGE`` before the first cell names a package without which the tutorial is shown and not run. Each tutorial
runs in a process and an empty folder of its own; pictures that a cell saves there as PNG are shown below it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
CACHE = ROOT / "build" / "tutorials"
SECONDS = 600  # that one tutorial may take, on a busy machine


class Cell(NamedTuple):
    """A part of a tutorial."""

    is_code: bool
    line: int  # of its first line, counted from 1
    text: str


def names() -> list[str]:
    """The tutorials in their order.

    Returns:
        File names without suffix.
    """
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))


def cells(source: str) -> list[Cell]:
    """Split a tutorial.

    Args:
        source: Its text.

    Returns:
        The cells; comment signs are removed from text.
    """
    found = []
    starts = [*re.finditer(r"^# %%(.*)\n", source, re.MULTILINE)]
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(source)], strict=True):
        text = source[start.end() : end].strip("\n")
        is_code = "[markdown]" not in start[1]
        found.append(Cell(is_code, source.count("\n", 0, start.end()) + 1, text if is_code else _uncommented(text)))
    return found


def _uncommented(text: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())


def missing(source: str) -> list[str]:
    """Packages that a tutorial needs and this environment lacks.

    Args:
        source: Its text.

    Returns:
        Their names.
    """
    needed = re.findall(r"^# requires: (\S+)$", source, re.MULTILINE)
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run(name: str, out: Path) -> None:
    """Execute a tutorial here, in the working directory, and write its page.

    Args:
        name: Its name.
        out: Folder of ``NAME.md`` and the figures.
    """
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    lacking = missing(source)
    module = types.ModuleType("tutorial")
    sys.modules["tutorial"] = module  # where its classes say that they come from
    parts, figures = [], 0
    for cell in cells(source):
        if not cell.is_code:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text}\n```")
        if lacking:
            continue
        code = compile("\n" * (cell.line - 1) + cell.text, str(FOLDER / f"{name}.py"), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        if printed.getvalue().strip():
            parts.append(f"``` {{.text .output}}\n{printed.getvalue().rstrip()}\n```")
        for path in sorted(Path().glob("*.png")):  # what the cell has saved
            figures += 1
            shutil.move(path, out / f"{name}_{path.name}")
            parts.append(f"![Figure {figures} of this tutorial]({name}_{path.name})")
    if lacking:
        parts.insert(1, f"!!! note\n    Shown and not run: this environment lacks {', '.join(lacking)}.")
    parts.append(f"---\n\nThis page is [`docs/tutorials/{name}.py`]({name}.py), executed by `make docs`.")
    (out / f"{name}.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def render(name: str, out: Path) -> Path:
    """Execute a tutorial in a process of its own.

    Args:
        name: Its name.
        out: Folder of the page and its figures.

    Returns:
        The page.

    Raises:
        RuntimeError: If the tutorial fails; with what it wrote.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "docs.site.tutorials", name, "--here", "--out", str(out.resolve())]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"docs/tutorials/{name}.py fails:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return out / f"{name}.md"


def cached(name: str) -> list[Path]:
    """The page of a tutorial and its figures, executed only if it or the package has changed.

    Args:
        name: Its name.

    Returns:
        Files in `CACHE`, the page among them.
    """
    folder, key = CACHE / name, _key(name)
    stamp = folder / "key"
    if not stamp.exists() or stamp.read_text("utf-8") != key:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"tutorials: running {name}")
        render(name, folder)
        stamp.write_text(key, "utf-8")
    return sorted(path for path in folder.iterdir() if path.name != "key")


def _key(name: str) -> str:
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    return hashlib.sha256((source + repr(missing(source)) + _package_key()).encode()).hexdigest()


@functools.cache
def _package_key() -> str:
    folders = [ROOT / "lightning_bayes", ROOT / "callbacks", ROOT / "zoo"]
    digest = hashlib.sha256()
    for path in [*sorted(path for folder in folders for path in folder.rglob("*.py")), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Run tutorials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="tutorials; all by default")
    parser.add_argument("--out", type=Path, default=CACHE / "loose", help="folder of pages and figures")
    parser.add_argument("--here", action="store_true", help="in this process and folder")
    options = parser.parse_args()
    for name in options.names or names():
        if options.here:
            warnings.simplefilter("ignore")
            run(name, options.out)
        else:
            print(render(name, options.out))


if __name__ == "__main__":
    main()
