"""Trees of the repository: the working tree, an old commit beside it, and a Python process inside of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out a commit into a temporary folder, which is removed afterwards.

    Args:
        revision: A commit, branch or tag.

    Yields:
        The root of the tree.

    Raises:
        SystemExit: If there is no such commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        added = _git("worktree", "add", "--detach", str(tree), revision)
        if added.returncode:
            raise SystemExit(f"git has no tree of {revision!r}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def short_name(revision: str) -> str:
    """Return the abbreviated hash of a commit.

    Args:
        revision: A commit, branch or tag.

    Returns:
        The hash, or the text as it was given where git does not know it.
    """
    return _git("rev-parse", "--short", f"{revision}^{{commit}}").stdout.strip() or revision


def environment(root: Path | str) -> dict[str, str]:
    """Make an environment in which the package and the benchmarks are those of a tree.

    Args:
        root: The root of the tree.

    Returns:
        The environment variables of a child process.
    """
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}


def probe_command(probe: str, *arguments: str) -> list[str]:
    """Make the command that runs the text of a probe, which then imports the package of its working directory.

    Args:
        probe: The probe's path below ``benchmarks/`` without ``.py``.
        *arguments: Its command line.

    Returns:
        The command.
    """
    return [sys.executable, "-c", (ROOT / "benchmarks" / f"{probe}.py").read_text("utf-8"), *arguments]


def run_probe(probe: str, root: Path | str, *arguments: str) -> Any:
    """Run a probe inside a tree.

    Args:
        probe: The probe's path below ``benchmarks/`` without ``.py``.
        root: The root of the tree whose package the probe imports.
        *arguments: Its command line.

    Returns:
        The last line that the probe printed, read as JSON.

    Raises:
        SystemExit: If the probe failed.
    """
    command = probe_command(probe, *arguments)
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{probe} failed in {root}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
