"""Trees of the repository: the working tree, checkouts of old commits, and Python processes inside a tree."""

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

ROOT = Path(__file__).parents[2]


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out a commit into a temporary folder, and remove it afterwards; exit if the commit does not exist."""
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
    """The abbreviated hash of a commit, branch or tag; the text itself if git does not know it."""
    return _git("rev-parse", "--short", f"{revision}^{{commit}}").stdout.strip() or revision


def run_probe(probe: str, root: Path | str, *arguments: str) -> Any:
    """Run a probe inside a tree and parse the last line of its output as JSON; exit if it fails."""
    text = (ROOT / "benchmarks" / f"{probe}.py").read_text("utf-8")
    command = [sys.executable, "-c", text, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{probe} failed in {root}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
