"""Where and how the steps run: arguments that all speed benchmarks share."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch

PRECISIONS = ("32", "bf16-mixed")
VARIABLES = ("MALLOC_", "MKL_", "OMP_", "GOMP_", "ONEDNN_")  # that change the speed of torch's libraries


@dataclass(frozen=True)
class Setting:
    """One way to run.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        precision: ``"32"``, or ``"bf16-mixed"`` for autocast round forward and loss.
        threads: Threads of torch on the CPU.
        workspace_mib: Limit of VOGN's workspace in MiB; None is the package's default.
    """

    device: str = "cpu"
    precision: str = "32"
    threads: int = 1
    workspace_mib: float | None = None

    def arguments(self) -> list[str]:
        """The command-line arguments that mean this setting, for a process of its own."""
        arguments = ["--device", self.device, "--precision", self.precision, "--threads", str(self.threads)]
        return arguments if self.workspace_mib is None else [*arguments, "--workspace", str(self.workspace_mib)]

    def workspace(self) -> dict[str, Any]:
        """Keyword arguments of what has a workspace."""
        return {} if self.workspace_mib is None else {"workspace_mib": self.workspace_mib}

    def describe(self) -> dict[str, Any]:
        """What to keep beside a result."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        return {
            "device": name,
            "precision": self.precision,
            "threads": self.threads,
            "workspace_mib": self.workspace_mib,
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        }

    def synchronise(self) -> None:
        """Wait until the device has done what it was asked for."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a setting to `parser`."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="32", choices=PRECISIONS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on the CPU")
    parser.add_argument("--workspace", type=float, metavar="MIB", help="limit of VOGN's workspace")


def read_setting(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Setting:
    """Set the threads, and end the program in words where the device is not there.

    Args:
        parser: The parser of the options.
        options: Parsed options.

    Returns:
        The setting.
    """
    missing = missing_for(options.device)
    if missing:
        parser.error(missing)
    torch.set_num_threads(options.threads)
    return Setting(options.device, options.precision, options.threads, options.workspace)


def missing_for(device: str) -> str | None:
    """What is missing to run on `device`, in words; None if it is there."""
    if device != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"--device cuda: torch {torch.__version__} was built without CUDA. Install a build with CUDA."
    return (
        f"--device cuda: torch {torch.__version__} has CUDA {torch.version.cuda} but finds no GPU and driver "
        f"(torch.cuda.device_count() = {torch.cuda.device_count()}). Run this on a machine with an NVIDIA GPU."
    )
