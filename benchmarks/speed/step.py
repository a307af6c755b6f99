"""Time and peak added memory of a full training step for every method, compared with torch's Adam in one process.

    python -m benchmarks.speed.step [--models lenet resnet18] [--methods vogn-fused,opacus] [--batch 32 128]
        [--rounds 15] [--threads 2] [--device cpu|cuda] [--precision 32|bf16-mixed] [--clock wall|cpu] [--json FILE]

A step is everything between two batches: noise, forward, backward, curvature, update. Each round times every method once.
The ratio to Adam is computed within a round; the output has its median over rounds and its quartiles. The step of K-FAC is
the mean over T_inv updates, computed from the kinds of its steps (`benchmarks.speed.cycle`). Methods that cannot run are
listed with the reason. Peak memory is measured in a separate process per method. The extra `bench` installs the peers.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import save_json
from benchmarks.speed.cycle import combine, expand
from benchmarks.speed.memory import measure_apart
from benchmarks.speed.methods import METHODS, Step, obstacle, silence_known_warnings
from benchmarks.speed.models import MODELS, make_task
from benchmarks.speed.rounds import CLOCKS, Times, interleave, stopwatch, words
from benchmarks.speed.setting import Setting, add_arguments, read_setting

BASELINE = "adam"
PEERS = ("opacus", "ivon-opt")
Row = dict[str, Any]


def measure_model(
    model: str,
    batch: int,
    methods: list[str],
    rounds: int,
    setting: Setting,
    memory: bool = True,
    clock: str = "wall",
) -> list[Row]:
    """Time every method on one model and batch size, then measure the memory of the methods that ran.

    Args:
        model: Key of `MODELS`.
        batch: Examples per step.
        methods: Keys of `METHODS`, including the baseline.
        rounds: Interleaved rounds after the warm-up.
        setting: Device, precision and threads.
        memory: Whether to measure memory.
        clock: Key of `CLOCKS`.

    Returns:
        One row per method: seconds, ratio and rounds, or the reason why the method did not run.
    """
    built, reasons = _build(model, batch, methods, setting)
    steps = expand(built)
    built.clear()
    times = interleave(steps, rounds, BASELINE, stopwatch(setting.synchronise, clock))
    steps.clear()
    _free(setting)
    shares = combine(times, methods)
    reasons |= times.failures
    rows = [_row(method, times, reasons) for method in methods]
    for row in rows:
        row |= {"model": model, "batch": batch}
        if row["method"] in shares:
            row["shares"] = shares[row["method"]]
        if memory and "reason" not in row:
            row["added_mib"], row["memory_reason"] = measure_apart(model, batch, row["method"], setting)
    return rows


def _build(model: str, batch: int, methods: list[str], setting: Setting) -> tuple[dict[str, Step], dict[str, str]]:
    steps: dict[str, Step] = {}
    reasons: dict[str, str] = {}
    for name in methods:
        try:
            task = make_task(MODELS[model], batch, setting)
            reason = obstacle(METHODS[name], task)
            if reason is None:
                steps[name] = METHODS[name].build(task)
        except Exception as error:  # an error of a library is a result
            reason = words(error)
        if reason is not None:
            reasons[name] = reason
    return steps, reasons


def _free(setting: Setting) -> None:
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()


def _row(method: str, times: Times, reasons: dict[str, str]) -> Row:
    if method in reasons:
        return {"method": method, "reason": reasons[method]}
    return {
        "method": method,
        "seconds": times.median_seconds(method),
        "ratio": times.median_ratio(method, BASELINE),
        "quartiles": times.ratio_quartiles(method, BASELINE),
        "rounds": len(times.seconds[method]),
    }


def in_words(row: Row, rounds: int) -> str:
    """Format a row as one printed line."""
    head = f"{row['model']:18} {row['batch']:4} {row['method']:15}"
    if "reason" in row:
        return f"{head} not run: {row['reason']}"
    ratio = "   ?" if row["ratio"] is None else f"{row['ratio']:6.2f}"
    line = f"{head} {row['seconds'] * 1e3:10.2f} ms {ratio} × Adam"
    if row.get("quartiles"):
        line += " ({:.2f} to {:.2f})".format(*row["quartiles"])
    if "shares" in row:
        line += f" [{', '.join(f'{name} {share:.1%}' for name, share in row['shares'].items())}]"
    if row.get("added_mib") is not None:
        line += f" {row['added_mib']:9.1f} MiB"
    elif row.get("memory_reason"):
        line += f"  no memory figure: {row['memory_reason']}"
    return line if row["rounds"] == rounds else f"{line}  ({row['rounds']} of {rounds} rounds: slow)"


def peer_versions() -> dict[str, str]:
    """Versions of the peers; ``absent`` if one is not installed."""
    versions = {}
    for name in PEERS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def run_all(options: argparse.Namespace, setting: Setting) -> Iterator[list[Row]]:
    """Yield the rows of each model and batch size."""
    methods = [BASELINE, *(name for name in options.methods if name != BASELINE)]
    for model in options.models:
        for batch in options.batch or MODELS[model].batches:
            yield measure_model(model, batch, methods, options.rounds, setting, not options.no_memory, options.clock)


class MethodNames(argparse.Action):
    """Method names, separated by spaces or commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the names, or exit with an error that lists the unknown ones."""
        names = [name for value in values or () for name in value.split(",")]
        if unknown := [name for name in names if name not in METHODS]:
            parser.error(f"{option_string}: unknown {', '.join(unknown)}; choose from {', '.join(METHODS)}")
        setattr(namespace, self.dest, names)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--methods", nargs="+", action=MethodNames, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--batch", type=int, nargs="+", help="default: 32 and 128; 16 for the ImageNet size")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: processor time, for a busy machine")
    parser.add_argument("--no-memory", action="store_true", help="measure time only")
    parser.add_argument("--json", type=Path, help="written after every model and batch size")
    add_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; write JSON if requested."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    if options.clock == "cpu" and (options.device != "cpu" or options.threads != 1):
        parser.error("--clock cpu compares steps of one thread on the CPU: add --device cpu --threads 1")
    silence_known_warnings()
    header = {**peer_versions(), **setting.describe(), "rounds": options.rounds, "clock": options.clock}
    rows: list[Row] = []
    for new_rows in run_all(options, setting):
        print("\n".join(in_words(row, options.rounds) for row in new_rows), flush=True)
        rows += new_rows
        save_json(options.json, {**header, "results": rows})


if __name__ == "__main__":
    main()
