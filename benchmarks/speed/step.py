"""Seconds of a full training step of VOGN against torch's Adam, interleaved in one process.

    python -m benchmarks.speed.step [--models lenet resnet18] [--batch 32] [--rounds 15] [--threads 2] [--json FILE]

A step is everything between two batches: noise, forward, backward, curvature, update. Rounds visit every method once, so a
busy machine slows all of them; the ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.provenance import provenance
from lightning_bayes import VOGN
from lightning_bayes.zoo.models import LeNet5

MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: LeNet5(num_classes=10, in_channels=3, image_size=32),
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
}


def adam_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A step of torch's Adam on a fixed batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def vogn_step(engine: str) -> Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]:
    """A step of VOGN with one weight sample, by the engine of that name."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
        optimizer = VOGN(model, lr=1e-4, num_data=50_000, step_rule="trust_region", relative_noise=0.3, engine=engine)

        def step() -> None:
            with optimizer.sampled_params():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    return build


METHODS = {"adam": adam_step, "vogn fused": vogn_step("fused"), "vogn backpack": vogn_step("backpack")}
NOT_POSSIBLE = {("resnet18", "vogn backpack")}  # BackPACK refuses residuals that are added in place


def measure_model(name: str, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time every method on one model.

    Args:
        name: A key of `MODELS`.
        batch: Examples per step, 3 × 32 × 32.
        rounds: Interleaved rounds after two of warm-up.

    Returns:
        Median seconds and median ratio to Adam by method.
    """
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    steps = {m: build(MODELS[name](), x, y) for m, build in METHODS.items() if (name, m) not in NOT_POSSIBLE}
    times: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(rounds + 2):
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            times[method].append(time.perf_counter() - start)
    return {
        method: {
            "seconds": statistics.median(seconds[2:]),
            "ratio": statistics.median(s / a for s, a in zip(seconds[2:], times["adam"][2:], strict=True)),
        }
        for method, seconds in times.items()
    }


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {name: measure_model(name, options.batch, options.rounds) for name in options.models}
    for name, methods in results.items():
        for method, found in methods.items():
            print(f"{name:10} {method:14} {found['seconds'] * 1e3:9.2f} ms   {found['ratio']:5.2f} × Adam")
    if options.json:
        setting = {"threads": options.threads, "batch": options.batch, "rounds": options.rounds}
        options.json.write_text(json.dumps({**provenance(), **setting, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
