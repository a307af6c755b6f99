"""What a newcomer does, each as a script in ``newcomer/``: the lines that the package adds, seconds, and what is printed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

NEWCOMER: Final = Path(__file__).with_name("newcomer")
TASKS: Final = {
    "shipped.py": "a posterior in the wheel",
    "classifier.py": "own classifier with BatchNorm",
    "regression.py": "own regression with mean and variance",
    "multilabel.py": "multilabel",
    "folder.sh": "a folder of images, on the command line",
    "checkpoint.py": "an AdamW checkpoint, afterwards",
    "serving.py": "serving with rejection",
    "ensemble.py": "an ensemble of three",
}
_LIMIT: Final = 1200  # seconds per task


class Done(NamedTuple):
    """A task that has run."""

    title: str
    lines: int  # that the package adds
    seconds: float
    printed: str  # the last line; of a failure, the error


def added_lines(script: Path) -> int:
    """Lines of code between the comments ``# added`` and ``# shown``."""
    text = script.read_text("utf-8").partition("# added\n")[2].partition("# shown\n")[0]
    return sum(bool(line.strip()) for line in text.splitlines())


def run_tasks(environment: Path, folder: Path) -> Iterator[Done]:
    """Run all scripts with the programs of an environment, in an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits.py").write_bytes((NEWCOMER / "digits.py").read_bytes())
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    for name, title in TASKS.items():
        script = NEWCOMER / name
        (folder / name).write_bytes(script.read_bytes())
        program = "bash" if name.endswith(".sh") else "python"
        start = time.perf_counter()
        done = subprocess.run(
            [program, name], cwd=folder, env=variables, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
        yield Done(title, added_lines(script), time.perf_counter() - start, _last(done))


def _last(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of the output, or of the error of a script that failed."""
    text = done.stderr if done.returncode else done.stdout
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{'fails: ' if done.returncode else ''}{lines[-1] if lines else ''}"


def table(tasks: list[Done]) -> str:
    """The tasks as a Markdown table."""
    rows = [
        f"| {done.title} | {done.lines} | {done.seconds:.0f} | {done.printed.replace('|', ',')} |" for done in tasks
    ]
    return "\n".join(["| task | added lines | seconds | printed |", "|---|---|---|---|", *rows])
