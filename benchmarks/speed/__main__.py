"""Time updates in a Trainer's fit as a ratio to the same optimizer without a callback.

    python -m benchmarks.speed [--networks lenet5 resnet18] [--methods VOGN IVON] [--rounds 7] [--json FILE]
    python -m benchmarks.speed --networks mlp256 mlp1024 --batch 8 32 128
    python -m benchmarks.speed --networks transformer vit_tiny embedding
    python -m benchmarks.speed --device cuda --precision bf16 --clock wall --batch 128 --networks resnet18 vit_small

Every round fits each method once, in a different order, in one process with one thread. Ratios are computed within a round,
because a busy machine slows all methods; the table has their median and quartiles. The CPU clock is the default.

The floor is Adam with one `normal_` and one `addcmul_` for each tensor. The start is the time of a fit's first five batches.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.provenance import save_json
from benchmarks.speed.fits import BASELINE, CLOCKS, FLOOR, METHODS, NETWORKS, PRECISIONS, cost_per_update

TARGETS = {  # largest median ratio
    "lenet5": {"VOGN": 1.3, "IVON": 1.4, "Noisy K-FAC": 1.45},
    "resnet18": {"VOGN": 1.1, "IVON": 1.2},
}
Times = dict[str, list[float]]  # seconds per update in every round, by method


class Ratio(NamedTuple):
    """Median and quartiles over rounds of the time of a method over that of the baseline."""

    median: float
    first: float
    third: float


def interleave(methods: list[str], rounds: int, timed: Callable[[str], float]) -> Times:
    """Time every method once per round; each round starts one method later than the round before."""
    times: Times = {method: [] for method in methods}
    for start in range(rounds):
        shift = start % len(methods)
        for method in [*methods[shift:], *methods[:shift]]:
            times[method].append(timed(method))
    return times


def ratio(times: Times, method: str, baseline: str = BASELINE) -> Ratio:
    """Compare a method with the baseline within each round; a single round is its own quartiles."""
    ratios = [own / base for own, base in zip(times[method], times[baseline], strict=True)]
    first, _, third = statistics.quantiles(ratios * (1 + (len(ratios) == 1)), n=4, method="inclusive")
    return Ratio(statistics.median(ratios), first, third)


def line(network: str, method: str, times: Times, starts: Times, batch: int) -> str:
    """Format a row of the Markdown table."""
    milliseconds, found = 1e3 * statistics.median(times[method]), ratio(times, method)
    target = TARGETS.get(network, {}).get(method)
    verdict = "" if target is None else f"≤ {target:g}: {'met' if found.median <= target else 'MISSED'}"
    ratios = f"{found.median:.2f} | {found.first:.2f} to {found.third:.2f}"
    floor = f"{ratio(times, method, FLOOR).median:.2f}" if FLOOR in times else ""
    start = f"{1e3 * statistics.median(starts[method]):.0f}"
    measured = f"{milliseconds:.2f} | {ratios} | {floor} | {start}"
    return f"| {NETWORKS[network].title} @ {batch} | {method} | {measured} | {verdict} |"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["lenet5", "resnet18"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if m != "ivon-opt"])
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    methods = [BASELINE, *(method for method in options.methods if method != BASELINE)]
    print("| network | method | ms per update | ratio to Adam | quartiles | to the floor | start, ms | target |")
    print("|---" * 8 + "|")
    results: dict[str, Any] = {}
    memory: dict[str, dict[str, float]] = {}
    starts: dict[str, Times] = {}
    setting = {key: getattr(options, key) for key in ("batch", "rounds", "clock", "threads", "device", "precision")}
    for network, batch in itertools.product(options.networks, options.batch):
        key = network if len(options.batch) == 1 else f"{network} @ {batch}"
        started = starts[key] = {method: [] for method in methods}

        def timed(method: str, network: str = network, batch: int = batch, key: str = key) -> float:
            fit = batch, options.clock, options.device, options.precision
            cost = cost_per_update(method, NETWORKS[network], *fit)
            memory.setdefault(key, {})[method] = cost.mib
            starts[key][method].append(cost.start)
            return cost.seconds

        timed(BASELINE)  # imports and the allocator's first blocks
        started[BASELINE].clear()
        results[key] = times = interleave(methods, options.rounds, timed)
        print("\n".join(line(network, method, times, started, batch) for method in methods), flush=True)
    if options.device == "cuda":
        print("MiB: " + ", ".join(f"{name} {mib:.0f}" for found in memory.values() for name, mib in found.items()))
    save_json(options.json, {**setting, "seconds": results, "start": starts, "mib": memory})


if __name__ == "__main__":
    main()
