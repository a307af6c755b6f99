"""The wheel in an empty environment: README's Python blocks and commands, with the seconds of each step.

    python -m benchmarks.first_hour [--reuse] [--folder FOLDER] [--json FILE]

The wheel is built and installed with the extra ``demo``; README runs in a folder outside of the repository. ``--reuse``
installs only the wheel and takes its dependencies from the environment of this process, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.provenance import save_json

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 3600  # limit per step
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NEEDS_DATA = ("finetune_imagefolder", "cifar10")  # commands that need the reader's data


class Step(NamedTuple):
    """A titled command: the program and its arguments."""

    title: str
    command: list[str]


def blocks(page: str, language: str) -> str:
    """All code blocks of a page in one language, joined; `page` is a path in the repository."""
    return "\n".join(match[2] for match in _FENCE.finditer((ROOT / page).read_text("utf-8")) if match[1] == language)


def commands(page: str) -> list[list[str]]:
    """The arguments of each ``lightning-bayes`` command of a page that needs no data of the reader."""
    lines = blocks(page, "bash").replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    runnable = [line for line in words if not any(name in word for word in line for name in _NEEDS_DATA)]
    return [line[1:] for line in runnable if line[:1] == ["lightning-bayes"]]


def installation(folder: Path, reuse: bool) -> Iterator[Step]:
    """Yield the steps that build the wheel and install it in an empty environment."""
    isolation = ["--no-isolation"] if reuse else []
    yield Step(
        "build the wheel", [sys.executable, "-m", "build", *isolation, "--outdir", str(folder / "dist"), str(ROOT)]
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


def readme(folder: Path) -> Iterator[Step]:
    """Yield the steps of README in order; each needs the results of the previous ones."""
    (folder / "readme.py").write_text(blocks("README.md", "python"), "utf-8")
    python = folder / "env" / "bin" / "python"
    yield Step("README's Python: own module, fit, predict, load, serve", [str(python), "readme.py"])
    for arguments in commands("README.md"):
        yield Step(shlex.join(["lightning-bayes", *arguments]), [str(folder / "env/bin/lightning-bayes"), *arguments])


def borrow(environment: Path) -> None:
    """Let an environment import the packages of this one; its own packages take precedence."""
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")


def run(steps: Iterable[Step], folder: Path) -> list[tuple[str, float]]:
    """Run steps in order and return their titles and seconds; exit with the output of a step that fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    timings = []
    for step in steps:
        start = time.perf_counter()
        done = subprocess.run(
            step.command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            raise SystemExit(f"first_hour: {step.title!r} fails:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        timings.append((step.title, time.perf_counter() - start))
        print(f"{timings[-1][1]:7.1f} s  {step.title}", flush=True)
    return timings


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reuse", action="store_true", help="take dependencies from this environment")
    parser.add_argument("--folder", type=Path, help="empty folder for the results (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        timings = run(installation(folder, options.reuse), folder) + run(readme(folder), folder)
    posterior, total = (sum(seconds for _, seconds in part) for part in (timings[:4], timings))
    print(f"{total:7.1f} s  {len(timings)} steps; {posterior / 60:.1f} minutes to the first posterior")
    save_json(options.json, {"reuse": options.reuse, "steps": dict(timings)})


if __name__ == "__main__":
    main()
