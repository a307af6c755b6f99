"""What a training step costs in units of Adam's, all models, batch sizes and methods in one table that can be resumed.

    python -m benchmarks.speed.targets [--models lenet …] [--batch 32 128] [--threads 2] [--seconds 45]
        [--json benchmarks/results/speed_targets.json]

Steps are not alike: one of ten measures the curvature and draws noise. Every kind is timed in every round, in an optimizer
of its own, and the mean step of a cycle is put together from them, round by round. A cell of the table is the median over
rounds of its ratio to Adam in the same round. `floor` is what no method with noise can do without: Adam, one pass that adds
noise to all weights, and a tenth of the draws. A model and batch size that the file holds for the same commit is not
measured again. ``--clock cpu`` is for one thread on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
from collections.abc import Callable
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
from lightning_bayes.optim import MeanFieldOptimizer

Row = dict[str, Any]
Build = Callable[[str, int, Setting], "Kinds"]
DEFAULT_MODELS = ("lenet", "alexnet", "vgg16", "vgg16-bn", "resnet18")
RESULT = Path(__file__).parents[1] / "results" / "speed_targets.json"
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
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
    """The kinds of a method's steps, and the weight of each in its mean step."""

    steps: dict[str, Step]
    weights: dict[str, float]


def amortised(method: type[MeanFieldOptimizer], interval: int, grafts: bool = False) -> Build:
    """A method as its callback without arguments runs it.

    Args:
        method: Its optimizer.
        interval: T.
        grafts: Whether the callback has ``step="natural"``.

    Returns:
        What builds nine plain steps of a cycle of ten, and the one that draws noise and measures what is measured.
    """

    def build(model: str, batch: int, setting: Setting) -> Kinds:
        tasks = [make_task(MODELS[model], batch, setting) for _ in range(2)]
        plain, tenth = (as_swapped(method, task, grafts, curvature_interval=interval) for task in tasks)
        steps = {"plain": _at(plain, tasks[0], 0), "tenth": _at(tenth, tasks[1], CYCLE)}
        return Kinds(steps, {"plain": 1 - 1 / CYCLE, "tenth": 1 / CYCLE})

    return build


def _at(optimizer: MeanFieldOptimizer, task: Task, ahead: int) -> Step:
    """Updates of one kind: the fourth of a cycle again and again, or the last of one cycle after the other."""
    number = [0, 2 * CYCLE + (CYCLE - 1 if ahead else 3)]  # of updates before this one: the first starts the curvature

    def step() -> None:
        before = number[0]
        for owner in (*optimizer.param_groups, *optimizer.state.values()):
            owner["step"] = before
        update_once(optimizer, task)
        number[:] = number[1], number[1] + ahead

    step()
    return step


def floor(model: str, batch: int, setting: Setting) -> Kinds:
    """Adam, and noise on all weights: one pass over them in each step, draws in one of ten."""
    task = make_task(MODELS[model], batch, setting)
    plain, flat = adam(task), torch.cat([param.detach().view(-1) for param in task.model.parameters()])
    draws, std, room = torch.randn_like(flat), torch.rand_like(flat), torch.empty_like(flat)

    def noisy() -> None:
        torch.addcmul(flat, draws, std, out=room)
        plain()

    def drawing() -> None:
        draws.normal_()
        noisy()

    return Kinds({"plain": noisy, "tenth": drawing}, {"plain": 1 - 1 / CYCLE, "tenth": 1 / CYCLE})


def whole(name: str) -> Build:
    """A method of `METHODS` whose steps are alike, or a cycle of K-FAC's."""

    def build(model: str, batch: int, setting: Setting) -> Kinds:
        step = METHODS[name].build(make_task(MODELS[model], batch, setting))
        if not isinstance(step, Cycle):
            return Kinds({"step": step}, {"step": 1.0})
        intervals = Intervals.of(name)
        rare = {"statistics": 1 / intervals.stats, "inversion": 1 / intervals.inverse}
        kinds = {kind: each for kind, each in step._asdict().items() if kind != "sampling"}
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
        batch: Examples in a step.
        setting: Where to run.
        methods: Keys of `ROWS`, Adam first.
        seconds: About how long the rounds may take.
        clock: Key of `CLOCKS`.

    Returns:
        One row for each method.
    """
    built = {name: ROWS[name][1](model, batch, setting) for name in methods}
    steps = {f"{name}: {kind}": step for name, kinds in built.items() for kind, step in kinds.steps.items()}
    timed, baseline = stopwatch(setting.synchronise, clock), next(iter(steps))
    first = interleave(dict(steps), 1, baseline, timed)
    round_takes = sum(next(iter(each.values())) for each in first.seconds.values())
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / round_takes)))
    times = interleave(steps, rounds, baseline, timed)
    return [_row(model, batch, name, kinds, times) for name, kinds in built.items()]


def _row(model: str, batch: int, name: str, kinds: Kinds, times: Times) -> Row:
    row: Row = {"model": model, "batch": batch, "method": name}
    failed = [times.failures[f"{name}: {kind}"] for kind in kinds.steps if f"{name}: {kind}" in times.failures]
    if failed:
        return {**row, "reason": failed[0]}
    adam_seconds = next(iter(times.seconds.values()))
    each = [
        sum(weight * times.seconds[f"{name}: {kind}"][r] for kind, weight in kinds.weights.items())
        for r in adam_seconds
        if all(r in times.seconds[f"{name}: {kind}"] for kind in kinds.weights)
    ]
    ratios = [mine / other for mine, other in zip(each, adam_seconds.values(), strict=False)]
    return {**row, "seconds": statistics.median(each), "ratio": statistics.median(ratios), "rounds": len(each)}


def table(rows: list[Row]) -> str:
    """Markdown: one line for each model and batch size, targets in brackets.

    Args:
        rows: What was measured.

    Returns:
        The table.
    """
    methods = [name for name in ROWS if any(row["method"] == name for row in rows)]
    lines = [
        f"| model | batch | {' | '.join(ROWS[name][0] for name in methods)} |",
        f"| --- | ---: |{' ---: |' * len(methods)}",
    ]
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["model"], row["batch"]) == (model, batch)}
        cells = [_cell(found.get(name), model, batch) for name in methods]
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
    """Measure what the file does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT_MODELS), choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long the rounds of a cell may take")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--json", type=Path, default=RESULT)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    silence_known_warnings()
    present = [name for name in options.methods if name != "ivon-opt" or importlib.util.find_spec("ivon")]
    methods = ["adam", *(name for name in present if name != "adam")]
    about = {**provenance(), **setting.describe(), "clock": options.clock}
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    same = all(kept.get(key) == about.get(key) for key in ("commit", "processor", "threads", "precision", "clock"))
    rows: list[Row] = kept.get("results", []) if same else []
    for model, batch in ((model, batch) for model in options.models for batch in options.batch):
        known = {row["method"] for row in rows if (row["model"], row["batch"]) == (model, batch)}
        if known >= set(methods):
            continue
        rows = [row for row in rows if (row["model"], row["batch"]) != (model, batch)]
        rows += measure(model, batch, setting, methods, options.seconds, options.clock)
        gc.collect()
        options.json.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
        print(table(rows).splitlines()[-1], flush=True)
    print(f"\n{about['processor']}, {setting.threads} threads, commit {about['commit']}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
