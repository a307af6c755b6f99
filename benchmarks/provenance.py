"""Provenance of results: machine, versions and commit, saved with every result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "torchmetrics", "torchvision", "backpack-for-pytorch")


def provenance() -> dict[str, str | int]:
    """Describe this machine and this checkout."""
    versions = {name: version(name) for name in PACKAGES}
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        **versions,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
    }


def save_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write a result and its provenance to a JSON file; without a path, do nothing."""
    if path is not None:
        path.write_text(json.dumps({**provenance(), **content}, indent=1) + "\n", "utf-8")


def saved_rows(path: Path | None, key: str = "results", **settings: Any) -> list[dict[str, Any]]:
    """The rows that an earlier run has saved under `key`; none without a file. Exit if the run had other settings."""
    if path is None or not path.exists():
        return []
    content = json.loads(path.read_text("utf-8"))
    for name, value in json.loads(json.dumps(settings)).items():
        if content.get(name) != value:
            raise SystemExit(f"{path} has runs with {content.get(name)}. Use the same settings or another file.")
    if "aggregated" in content:
        raise SystemExit(f"{path} has only means of a finished study, and no run can be added. Give another file.")
    rows: list[dict[str, Any]] = content[key]
    return rows


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
