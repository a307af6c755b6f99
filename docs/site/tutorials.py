"""Runs the tutorials and renders each as a page with its outputs and figures.

    python -m docs.site.tutorials [NAME ...] [--out FOLDER]

A tutorial is a Python file of cells: ``# %%`` starts code, ``# %% [markdown]`` starts text in comments. A line
``# requires: PACKAGE`` before the first cell names a required package; if it is missing, the tutorial is shown but not run.
Each tutorial runs in a separate process and an empty folder. PNG files that a cell saves there are shown below the cell.
"""

from __future__ import annotations

import argparse
import contextlib
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
SECONDS = 600  # timeout of one tutorial on a busy machine


class Cell(NamedTuple):
    """A code or text cell of a tutorial."""

    is_code: bool
    line: int  # line number of its first line, from 1
    text: str


def names() -> list[str]:
    """Sorted file names of the tutorials, without suffix."""
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))


def cells(source: str) -> list[Cell]:
    """Split the source of a tutorial into cells; text cells lose their comment signs."""
    split = []
    starts = [*re.finditer(r"^# %%(.*)\n", source, re.MULTILINE)]
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(source)], strict=True):
        text = source[start.end() : end].strip("\n")
        is_code = "[markdown]" not in start[1]
        split.append(Cell(is_code, source.count("\n", 0, start.end()) + 1, text if is_code else _uncommented(text)))
    return split


def _uncommented(text: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())


def missing(source: str) -> list[str]:
    """Names of the required packages of a tutorial that are not installed."""
    needed = re.findall(r"^# requires: (\S+)$", source, re.MULTILINE)
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run(name: str, out: Path) -> None:
    """Run a tutorial in this process and working directory; write ``NAME.md`` and its figures to ``out``."""
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    lacking = missing(source)
    module = types.ModuleType("tutorial")
    sys.modules["tutorial"] = module  # the __module__ of its classes
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
        for path in sorted(Path().glob("*.png")):  # figures saved by the cell
            figures += 1
            shutil.move(path, out / f"{name}_{path.name}")
            parts.append(f"![Figure {figures} of this tutorial]({name}_{path.name})")
    if lacking:
        parts.insert(1, f"!!! note\n    This tutorial was not run, because the environment lacks {', '.join(lacking)}.")
    parts.append(f"---\n\nThis page was generated from [`docs/tutorials/{name}.py`]({name}.py) by `make docs`.")
    (out / f"{name}.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def render(name: str, out: Path) -> Path:
    """Run a tutorial in a separate process.

    Args:
        name: Name of the tutorial.
        out: Output folder for the page and its figures.

    Returns:
        Path of the page.

    Raises:
        RuntimeError: If the tutorial fails; the message contains its output.
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
    """Page and figures of the last run of this source in `CACHE`; runs it without one, and if TUTORIALS=run is set."""
    source = (FOLDER / f"{name}.py").read_bytes()
    folder = CACHE / name / hashlib.sha256(source).hexdigest()[:12]
    if os.environ.get("TUTORIALS") == "run" or not (folder / f"{name}.md").exists():
        shutil.rmtree(CACHE / name, ignore_errors=True)
        print(f"tutorials: running {name}")
        render(name, folder)
    return sorted(folder.iterdir())


def main() -> None:
    """Run tutorials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="tutorials to run (default: all)")
    parser.add_argument("--out", type=Path, default=CACHE / "loose", help="output folder for pages and figures")
    parser.add_argument("--here", action="store_true", help="run in this process and folder")
    options = parser.parse_args()
    for name in options.names or names():
        if options.here:
            warnings.simplefilter("ignore")
            run(name, options.out)
        else:
            print(render(name, options.out))


if __name__ == "__main__":
    main()
