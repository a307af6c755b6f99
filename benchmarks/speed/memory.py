"""Peak memory that a training step adds to the model and its batch, each method in a process of its own.

    python -m benchmarks.speed.memory --model resnet18 --batch 32 --method vogn-fused

On the CPU it is the high-water mark of the resident set (``VmHWM`` of ``/proc/self/status``, Linux) over that of the process
when model and batch are built, so the optimizer's state counts. On a GPU it is what torch's allocator has given out.
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
STEPS = 8  # in the later ones, the optimizer's state and what lives on from step to step lie beside what the pass needs
ROOT = Path(__file__).parents[2]
STATUS = Path("/proc/self/status")


def parse_kib(text: str, field: str) -> int | None:
    r"""Read a field of ``/proc/self/status`` or ``/proc/meminfo``.

    Args:
        text: Content of the file.
        field: Name of the field, such as ``"VmHWM"``.

    Returns:
        Its value in KiB; None if it is not there.

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
    """Memory that is free on `device`; None where the system does not tell."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    available = parse_kib(info.read_text(), "MemAvailable") if info.exists() else None
    return None if available is None else available * 1024


class PeakMemory:
    """Peak of what is allocated from its construction on; `added_mib` reads it."""

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
        """MiB at the peak over those at construction."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / MIB - self.baseline
        return _high_water_mark() - self.baseline


def forget_peak() -> bool:
    """Let the high-water mark start at what is resident now: building a model passes a higher one.

    Returns:
        Whether the system lets us; where not, a part of the step's peak hides below the earlier one.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> float:
    """Peak resident memory of this process in MiB; NaN where the system does not tell."""
    kib = parse_kib(STATUS.read_text(), "VmHWM") if STATUS.exists() else None
    return float("nan") if kib is None else kib / 1024


def measure(model: str, batch: int, method: str, setting: Setting) -> float:
    """Run some steps in this process.

    Args:
        model: Key of the models.
        batch: Number of examples.
        method: Key of the methods.
        setting: Where to run.

    Returns:
        Peak added memory in MiB.
    """
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
    """Let torch make its threads and load its libraries before the baseline is taken."""
    layer = nn.Conv2d(3, 8, 3, device=device)
    layer(torch.randn(2, 3, 8, 8, device=device)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()


def measure_apart(model: str, batch: int, method: str, setting: Setting) -> tuple[float | None, str]:
    """As `measure`, in a process of its own.

    Returns:
        The added memory in MiB, and an empty string; or None, and why there is no figure.
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
        return f"the process was killed by signal {-done.returncode}; 9 is often a lack of memory"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with code {done.returncode} and said nothing"


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
