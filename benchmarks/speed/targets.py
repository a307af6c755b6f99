"""Training steps in units of Adam's step: one resumable table of all models, batch sizes and methods.

    python -m benchmarks.speed.targets [--models lenet …] [--batch 32 128] [--threads 2] [--seconds 45]
        [--json benchmarks/results/speed_targets.json]

Steps of a method differ: one of ten measures the curvature and draws noise. Each round times every kind of step with a
separate optimizer; the mean step of a cycle is computed from them per round. A table cell is the median over rounds of the
ratio to Adam in the same round. `floor` is the minimum for any method with noise: Adam, one pass that adds noise to all
weights, and a tenth of the draws. A model and batch size that the file already has for the same commit are skipped.
``--clock cpu`` is for one thread on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.provenance import provenance
from benchmarks.speed.cycle import Cycle, Intervals
from benchmarks.speed.methods import CYCLE, METHODS, adam, silence_known_warnings
from benchmarks.speed.models import MODELS, Task, make_task
from benchmarks.speed.rounds import CLOCKS, Step, Times, interleave, stopwatch
from benchmarks.speed.setting import Setting, add_arguments, read_setting
from benchmarks.speed.update import as_swapped, update_once
from lightning_bayes import IVON, VOGN, Vadam
from lightning_bayes.optim import VariationalOptimizer

Row = dict[str, Any]
Build = Callable[[str, int, Setting], "Kinds"]
DEFAULT_MODELS = ("lenet", "alexnet", "vgg16", "vgg16-bn", "resnet18")
RESULT = Path(__file__).parents[1] / "results" / "speed_targets.json"
MIN_ROUNDS, MAX_ROUNDS = 3, 25
TARGETS: dict[str, dict[tuple[str, int], float]] = {
    "vogn": {
        ("lenet", 32): 1.2,
        ("lenet", 128): 1.15,
        ("alexnet", 32): 1.3,
        ("alexnet", 128): 1.25,
        ("vgg16", 32): 1.25,
        ("vgg16", 128): 1.12,
        ("vgg16-bn", 32): 1.25,
        ("vgg16-bn", 128): 1.12,
        ("resnet18", 32): 1.15,
        ("resnet18", 128): 1.08,
    }
}
FOR_ALL = {"vadam": 1.15, "ivon": 1.15, "noisy_kfac": 1.3}


class Kinds(NamedTuple):
    """The kinds of steps of a method, and their weights in the mean step."""

    steps: dict[str, Step]
    weights: dict[str, float]


def amortised(method: type[VariationalOptimizer], interval: int, grafts: bool = False) -> Build:
    """A method as its callback runs it with default arguments.

    Args:
        method: The optimizer class.
        interval: T, updates per measurement.
        grafts: Whether the callback has ``step="natural"``.

    Returns:
        A function that builds the plain step, nine of a cycle of ten, and the step that draws noise and measures.
    """

    def build(model: str, batch: int, setting: Setting) -> Kinds:
        tasks = [make_task(MODELS[model], batch, setting) for _ in range(2)]
        plain, tenth = (as_swapped(method, task, grafts, curvature_interval=interval) for task in tasks)
        steps = {"plain": _at(plain, tasks[0], 0), "tenth": _at(tenth, tasks[1], CYCLE)}
        return Kinds(steps, {"plain": 1 - 1 / CYCLE, "tenth": 1 / CYCLE})

    return build


def _at(optimizer: VariationalOptimizer, task: Task, ahead: int) -> Step:
    """A step of one kind: with `ahead` 0 always the fourth of a cycle, with `ahead` T the last of successive cycles."""

    def run(count: int) -> None:
        for holder in (*optimizer.param_groups, *optimizer.state.values()):
            holder["step"] = count
        update_once(optimizer, task)

    run(0)  # initialises the curvature
    run(CYCLE - 1)  # stores the shape of the noise, as every tenth update does
    counts = itertools.count(2 * CYCLE + (CYCLE - 1 if ahead else 3), ahead)
    return lambda: run(next(counts))


def floor(model: str, batch: int, setting: Setting) -> Kinds:
    """Adam and the minimal cost of noise: one pass over all weights per step, draws in one step of ten."""
    task = make_task(MODELS[model], batch, setting)
    plain, flat = adam(task), torch.cat([param.detach().view(-1) for param in task.model.parameters()])
    draws, std, buffer = torch.randn_like(flat), torch.rand_like(flat), torch.empty_like(flat)

    def noisy() -> None:
        torch.addcmul(flat, draws, std, out=buffer)
        plain()

    def drawing() -> None:
        draws.normal_()
        noisy()

    return Kinds({"plain": noisy, "tenth": drawing}, {"plain": 1 - 1 / CYCLE, "tenth": 1 / CYCLE})


def whole(name: str) -> Build:
    """A method of `METHODS` with one kind of step, or with a cycle of K-FAC."""

    def build(model: str, batch: int, setting: Setting) -> Kinds:
        step = METHODS[name].build(make_task(MODELS[model], batch, setting))
        if not isinstance(step, Cycle):
            return Kinds({"step": step}, {"step": 1.0})
        intervals = Intervals.of(name)
        rare = {"statistics": 1 / intervals.stats, "inversion": 1 / intervals.inverse}
        kinds = {kind: timed for kind, timed in step._asdict().items() if kind != "sampling"}
        return Kinds(kinds, {**rare, "plain": 1 - sum(rare.values())})

    return build


ROWS: dict[str, tuple[str, Build]] = {
    "adam": ("Adam", whole("adam")),
    "adam-fused": ("Adam, fused", whole("adam-fused")),
    "floor": ("floor", floor),
    "vogn": ("VOGN", amortised(VOGN, CYCLE)),
    "vogn-t1": ("VOGN, T = 1", whole("vogn-fused")),
    "natural": ('VOGN, step="natural"', amortised(VOGN, CYCLE, grafts=True)),
    "vadam": ("Vadam", amortised(Vadam, CYCLE)),
    "ivon": ("IVON", amortised(IVON, 1)),
    "ivon-opt": ("ivon-opt", whole("ivon")),
    "noisy_kfac": ("Noisy K-FAC", whole("noisy_kfac")),
}


def measure(
    model: str, batch: int, setting: Setting, methods: list[str], seconds: float, clock: str = "wall"
) -> list[Row]:
    """Measure every method on one model at one batch size.

    Args:
        model: Key of `MODELS`.
        batch: Examples per step.
        setting: Device, precision and threads.
        methods: Keys of `ROWS`, Adam first.
        seconds: Approximate time limit for all rounds.
        clock: Key of `CLOCKS`.

    Returns:
        One row per method.
    """
    built = {name: ROWS[name][1](model, batch, setting) for name in methods}
    steps = {f"{name}: {kind}": step for name, kinds in built.items() for kind, step in kinds.steps.items()}
    timed, baseline = stopwatch(setting.synchronise, clock), next(iter(steps))
    first_round = interleave(dict(steps), 1, baseline, timed)
    round_seconds = sum(next(iter(times.values())) for times in first_round.seconds.values())
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / round_seconds)))
    times = interleave(steps, rounds, baseline, timed)
    return [_row(model, batch, name, kinds, times) for name, kinds in built.items()]


def _row(model: str, batch: int, name: str, kinds: Kinds, times: Times) -> Row:
    row: Row = {"model": model, "batch": batch, "method": name}
    failures = [times.failures[f"{name}: {kind}"] for kind in kinds.steps if f"{name}: {kind}" in times.failures]
    if failures:
        return {**row, "reason": failures[0]}
    adam_seconds = next(iter(times.seconds.values()))
    mean_steps = [
        sum(weight * times.seconds[f"{name}: {kind}"][r] for kind, weight in kinds.weights.items())
        for r in adam_seconds
        if all(r in times.seconds[f"{name}: {kind}"] for kind in kinds.weights)
    ]
    ratios = [seconds / baseline for seconds, baseline in zip(mean_steps, adam_seconds.values(), strict=False)]
    return {
        **row,
        "seconds": statistics.median(mean_steps),
        "ratio": statistics.median(ratios),
        "rounds": len(mean_steps),
    }


def table(rows: list[Row]) -> str:
    """Format a Markdown table with one line per model and batch size, and targets in brackets."""
    methods = [name for name in ROWS if any(row["method"] == name for row in rows)]
    lines = [
        f"| model | batch | {' | '.join(ROWS[name][0] for name in methods)} |",
        f"| --- | ---: |{' ---: |' * len(methods)}",
    ]
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        by_method = {row["method"]: row for row in rows if (row["model"], row["batch"]) == (model, batch)}
        cells = [_cell(by_method.get(name), model, batch) for name in methods]
        lines.append(f"| {MODELS[model].title} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None, model: str, batch: int) -> str:
    if row is None or "reason" in row:
        return "–"
    if row["method"] == "adam":
        return f"{row['seconds'] * 1e3:.1f} ms"
    target = TARGETS.get(row["method"], {}).get((model, batch), FOR_ALL.get(row["method"]))
    return f"{row['ratio']:.2f}" + ("" if target is None else f" [{target}]")


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing in the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT_MODELS), choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate time limit per cell")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--json", type=Path, default=RESULT)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    silence_known_warnings()
    installed = [name for name in options.methods if name != "ivon-opt" or importlib.util.find_spec("ivon")]
    methods = ["adam", *(name for name in installed if name != "adam")]
    header = {**provenance(), **setting.describe(), "clock": options.clock}
    saved = json.loads(options.json.read_text()) if options.json.exists() else {}
    same = all(saved.get(key) == header.get(key) for key in ("commit", "processor", "threads", "precision", "clock"))
    rows: list[Row] = saved.get("results", []) if same else []
    for model, batch in product(options.models, options.batch):
        measured = {row["method"] for row in rows if (row["model"], row["batch"]) == (model, batch)}
        if measured >= set(methods):
            continue
        rows = [row for row in rows if (row["model"], row["batch"]) != (model, batch)]
        rows += measure(model, batch, setting, methods, options.seconds, options.clock)
        gc.collect()
        options.json.write_text(json.dumps({**header, "results": rows}, indent=1) + "\n")
        print(table(rows).splitlines()[-1], flush=True)
    print(f"\n{header['processor']}, {setting.threads} threads, commit {header['commit']}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
