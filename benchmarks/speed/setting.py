"""The setting of a run: device, precision and threads, with the arguments that all speed benchmarks share."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch

PRECISIONS = ("32", "bf16-mixed")
VARIABLES = ("MALLOC_", "MKL_", "OMP_", "GOMP_", "ONEDNN_")  # variables that affect the speed of torch


@dataclass(frozen=True)
class Setting:
    """Device, precision and threads of a run.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        precision: ``"32"``, or ``"bf16-mixed"`` for autocast in forward and loss.
        threads: Number of CPU threads of torch.
        workspace_mib: Limit of VOGN's workspace in MiB; None uses the package's default.
    """

    device: str = "cpu"
    precision: str = "32"
    threads: int = 1
    workspace_mib: float | None = None

    def arguments(self) -> list[str]:
        """The command-line arguments of this setting, for a subprocess."""
        arguments = ["--device", self.device, "--precision", self.precision, "--threads", str(self.threads)]
        return arguments if self.workspace_mib is None else [*arguments, "--workspace", str(self.workspace_mib)]

    def workspace(self) -> dict[str, Any]:
        """The keyword argument ``workspace_mib``, if it is set."""
        return {} if self.workspace_mib is None else {"workspace_mib": self.workspace_mib}

    def describe(self) -> dict[str, Any]:
        """The entries to save with a result."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        return {
            "device": name,
            "precision": self.precision,
            "threads": self.threads,
            "workspace_mib": self.workspace_mib,
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        }

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a setting to `parser`."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="32", choices=PRECISIONS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of torch")
    parser.add_argument("--workspace", type=float, metavar="MIB", help="limit of VOGN's workspace")


def read_setting(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Setting:
    """Build the setting and set torch's threads; exit with an error if the device is not available."""
    missing = missing_for(options.device)
    if missing:
        parser.error(missing)
    torch.set_num_threads(options.threads)
    return Setting(options.device, options.precision, options.threads, options.workspace)


def missing_for(device: str) -> str | None:
    """The reason why `device` is not available; None if it is."""
    if device != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"--device cuda: torch {torch.__version__} was built without CUDA. Install a build with CUDA."
    return (
        f"--device cuda: torch {torch.__version__} has CUDA {torch.version.cuda} but finds no GPU and driver "
        f"(torch.cuda.device_count() = {torch.cuda.device_count()}). Run this on a machine with an NVIDIA GPU."
    )
