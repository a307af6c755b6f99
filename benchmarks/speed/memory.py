"""Peak memory that a training step adds to the model and its batch, measured in a separate process per method.

    python -m benchmarks.speed.memory --model resnet18 --batch 32 --method vogn-fused

On the CPU it is the high-water mark of the resident set (``VmHWM`` in ``/proc/self/status``, Linux), relative to the process
with model and batch; the optimizer's state counts. On a GPU it is the peak of torch's allocator.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.speed.setting import Setting, add_arguments, read_setting

MIB = 2**20
STEPS = 8  # enough that the peak includes the optimizer's state and everything that persists between steps
ROOT = Path(__file__).parents[2]
STATUS = Path("/proc/self/status")


def parse_kib(text: str, field: str) -> int | None:
    r"""Read a field of ``/proc/self/status`` or ``/proc/meminfo``.

    Args:
        text: Content of the file.
        field: Name of the field, such as ``"VmHWM"``.

    Returns:
        Its value in KiB; None if absent.

    Example:
        >>> parse_kib("VmPeak:\t  300 kB\nVmHWM:\t  200 kB\n", "VmHWM")
        200
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    return None


def available_bytes(device: str) -> int | None:
    """Free memory on `device`; None if unknown."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    available = parse_kib(info.read_text(), "MemAvailable") if info.exists() else None
    return None if available is None else available * 1024


class PeakMemory:
    """Measures the peak memory since its construction; `added_mib` reads it."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.baseline: float = torch.cuda.memory_allocated() / MIB
        else:
            forget_peak()
            self.baseline = _high_water_mark()

    def added_mib(self) -> float:
        """Peak memory in MiB, less the memory at construction."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / MIB - self.baseline
        return _high_water_mark() - self.baseline


def forget_peak() -> bool:
    """Reset the high-water mark to the resident set, because building a model can exceed the peak of a step.

    Returns:
        Whether the system allows the reset. If not, the measured peak is too low.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> float:
    """Peak resident memory of this process in MiB; NaN if unknown."""
    kib = parse_kib(STATUS.read_text(), "VmHWM") if STATUS.exists() else None
    return float("nan") if kib is None else kib / 1024


def measure(model: str, batch: int, method: str, setting: Setting) -> float:
    """Run a few steps in this process and return the peak added memory in MiB."""
    from benchmarks.speed.methods import METHODS, silence_known_warnings
    from benchmarks.speed.models import MODELS, make_task

    silence_known_warnings()
    importlib.import_module(METHODS[method].module)
    _warm_up(setting.device)
    task = make_task(MODELS[model], batch, setting)
    peak = PeakMemory(setting.device)
    step = METHODS[method].build(task)
    for _ in range(STEPS):
        step()
    return peak.added_mib()


def _warm_up(device: str) -> None:
    """Let torch start its threads and load its libraries before the baseline is measured."""
    layer = nn.Conv2d(3, 8, 3, device=device)
    layer(torch.randn(2, 3, 8, 8, device=device)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()


def measure_apart(model: str, batch: int, method: str, setting: Setting) -> tuple[float | None, str]:
    """As `measure`, in a subprocess.

    Returns:
        The added memory in MiB and an empty string, or None and the reason.
    """
    command = [sys.executable, "-m", "benchmarks.speed.memory", "--model", model, "--batch", str(batch)]
    done = subprocess.run(
        [*command, "--method", method, *setting.arguments()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return None, _last_words(done)
    added = json.loads(done.stdout.splitlines()[-1])["added_mib"]
    return added, "" if added is not None else "no /proc/self/status on this system"


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the process was killed by signal {-done.returncode}; 9 often means out of memory"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process exited with code {done.returncode} without output"


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--method", required=True)
    add_arguments(parser)
    options = parser.parse_args()
    added = measure(options.model, options.batch, options.method, read_setting(parser, options))
    print(json.dumps({"added_mib": None if added != added else added}))


if __name__ == "__main__":
    main()
