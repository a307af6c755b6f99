"""Where a figure comes from: machine, versions and commit, kept beside every result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "lightning", "torchmetrics", "torchvision", "backpack-for-pytorch")


def provenance() -> dict[str, str | int]:
    """Describe this machine and this checkout.

    Returns:
        Processor, cores, Python, package versions, and the commit with ``+changes`` if the checkout differs from it.
    """
    versions = {name: version(name) for name in PACKAGES}
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        **versions,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
