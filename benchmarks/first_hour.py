"""What a newcomer does in the first hour, from an empty environment, with seconds for each step.

    python -m benchmarks.first_hour [--reuse] [--folder FOLDER] [--json FILE]

The wheel is built and installed with the extra ``demo``; then README's Python blocks and its commands run in their order, in
a folder outside of the repository, and a posterior file is served. No step uses anything that README does not say.
``--reuse`` installs the wheel alone and finds its dependencies in the environment of this process, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 3600  # that one step may take
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NEEDS_DATA = ("finetune_imagefolder", "cifar10")  # commands that name data of the reader's own


class Step(NamedTuple):
    """One thing to do.

    Attributes:
        title: In the table.
        command: The program and its arguments.
    """

    title: str
    command: list[str]


def blocks(page: str, language: str) -> str:
    """README's code in one language.

    Args:
        page: Path below the repository.
        language: After the fence.

    Returns:
        All blocks, joined.
    """
    return "\n".join(match[2] for match in _FENCE.finditer((ROOT / page).read_text("utf-8")) if match[1] == language)


def commands(page: str) -> list[list[str]]:
    """The commands in README that need no data of the reader's own.

    Args:
        page: Path below the repository.

    Returns:
        Arguments of ``lightning-bayes``, one list a command.
    """
    lines = blocks(page, "bash").replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    runnable = [line for line in words if not any(name in word for word in line for name in _NEEDS_DATA)]
    return [line[1:] for line in runnable if line[:1] == ["lightning-bayes"]]


def steps(folder: Path, reuse: bool) -> Iterator[Step]:
    """The steps in their order; each is made after the one before has run.

    Args:
        folder: An empty folder, in which all of them run.
        reuse: Whether to take dependencies from the environment of this process.

    Yields:
        The steps.
    """
    isolation = ["--no-isolation"] if reuse else []
    yield Step(
        "build the wheel",
        [sys.executable, "-m", "build", *isolation, "--outdir", str(folder / "dist"), str(ROOT)],
    )
    python = folder / "env" / "bin" / "python"
    yield Step("create an environment", [sys.executable, "-m", "venv", str(folder / "env")])
    if reuse:
        borrow(folder / "env")
    (wheel,) = (folder / "dist").glob("*.whl")
    yield Step(
        "install the wheel",
        [str(python), "-m", "pip", "install", "--quiet", *(["--no-deps"] if reuse else []), f"{wheel}[demo]"],
    )
    (folder / "readme.py").write_text(blocks("README.md", "python"), "utf-8")
    yield Step("README's Python: own module, fit, predict, load, serve", [str(python), "readme.py"])
    for arguments in commands("README.md"):
        yield Step(shlex.join(["lightning-bayes", *arguments]), [str(folder / "env/bin/lightning-bayes"), *arguments])


def borrow(environment: Path) -> None:
    """Let an environment find the packages of this one; what it installs itself comes first.

    Args:
        environment: Its folder.
    """
    own = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")


def run(folder: Path, reuse: bool) -> list[tuple[str, float]]:
    """Take all steps.

    Args:
        folder: As in `steps`.
        reuse: As in `steps`.

    Returns:
        Title and seconds of each.

    Raises:
        SystemExit: If one fails, with the end of what it wrote.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    taken = []
    for step in steps(folder, reuse):
        start = time.perf_counter()
        done = subprocess.run(
            step.command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            raise SystemExit(f"first_hour: {step.title!r} fails:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        taken.append((step.title, time.perf_counter() - start))
        print(f"{taken[-1][1]:7.1f} s  {step.title}", flush=True)
    return taken


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reuse", action="store_true", help="take dependencies from this environment")
    parser.add_argument("--folder", type=Path, help="an empty folder to keep the results in (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        taken = run(folder, options.reuse)
    posterior = sum(seconds for _, seconds in taken[:4])
    total = sum(seconds for _, seconds in taken)
    print(f"{total:7.1f} s  {len(taken)} steps; {posterior / 60:.1f} minutes to the first posterior")
    if options.json:
        record = {"reuse": options.reuse, "steps": dict(taken), **provenance()}
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
