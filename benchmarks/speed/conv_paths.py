"""Benefit of each path in the rule of convolutions: time of a measured pass without the path, relative to all paths.

python -m benchmarks.speed.conv_paths [--models vgg16] [--rounds 15] [--json FILE]

A path is a strategy of `rules.conv.plan` or a layout of patches. All variants of a model run in turn in one process; ratios
are computed within a round. A ratio of 1.10 means that the pass takes 10 % longer without the path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.provenance import save_json
from benchmarks.speed.models import MODELS, Task, make_task
from benchmarks.speed.rounds import CLOCKS, interleave, stopwatch
from benchmarks.speed.setting import Setting, add_arguments, read_setting
from lightning_bayes.curvature import make_engine
from lightning_bayes.curvature.rules import conv
from lightning_bayes.curvature.rules.conv import patches
from lightning_bayes.curvature.rules.conv.plan import STRATEGIES, plan
from lightning_bayes.curvature.rules.conv.shape import conv_shape
from lightning_bayes.curvature.rules.conv.windows import Conv

NETWORKS = ("lenet", "alexnet", "vgg16", "resnet18")
ALL = "all paths"
Row = dict[str, Any]


def without_strategy(name: str) -> AbstractContextManager[Any]:
    """Plan as if the strategy `name` did not exist."""
    return patch.object(conv, "plan", partial(plan, without={name}))


def without_rows() -> AbstractContextManager[Any]:
    """Copy whole patches, even if the rows of a kernel could share a copy."""
    return patch.object(patches, "goes_by_rows", lambda layer, positions: False)


def without_whole_vectors() -> AbstractContextManager[Any]:
    """Multiply matrices without padding their rows to whole vectors."""
    return patch.object(patches, "VECTOR", 1)


PATHS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    ALL: nullcontext,
    **{s.name: partial(without_strategy, s.name) for s in STRATEGIES if s.name != "patches"},
    "kernel rows": without_rows,
    "whole vectors": without_whole_vectors,
}


def strategies_of(task: Task) -> dict[str, str]:
    """The strategy of each convolution in the task's model, by the layer's name."""
    strategies: dict[str, str] = {}

    def note(name: str, layer: Conv, args: tuple[Tensor, ...], output: Tensor) -> None:
        strategies[name] = plan(conv_shape(layer, args[0], output), output.device).name

    layers = [(name, m) for name, m in task.model.named_modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers]
    with torch.no_grad():
        task.model(task.images)
    for hook in hooks:
        hook.remove()
    return strategies


def measured_pass(task: Task, path: str) -> Callable[[], None]:
    """A pass of the fused engine without `path`."""
    engine = make_engine("fused", task.model)

    def run() -> None:
        with PATHS[path](), engine.capture() as captured:
            loss = task.loss()
            captured.observe(loss)
            loss.backward()
        engine.workspace.give_back(captured.squares.values())
        task.model.zero_grad()

    return run


def measure_paths(network: str, batch: int, rounds: int, clock: str, setting: Setting) -> Iterator[Row]:
    """Time the paths that `network` uses, and yield one row per path."""
    task = make_task(MODELS[network], batch, setting)
    used = set(strategies_of(task).values())
    paths = [path for path in PATHS if path in used or path in {ALL, "kernel rows", "whole vectors"}]
    steps = {path: measured_pass(task, path) for path in paths}
    times = interleave(steps, rounds, ALL, stopwatch(setting.synchronise, clock))
    for path in paths:
        yield {
            "model": network,
            "batch": batch,
            "path": path,
            "layers": sum(name == path for name in strategies_of(task).values()),
            "seconds": times.median_seconds(path),
            "ratio": times.median_ratio(path, ALL),
            "quartiles": times.ratio_quartiles(path, ALL),
        }


def in_words(row: Row) -> str:
    """Format a row as one printed line."""
    first, third = row["quartiles"] or (float("nan"),) * 2
    layers = f"{row['layers']:2d} layers" if row["layers"] else " " * 9
    return (
        f"{MODELS[row['model']].title:10s} {row['path']:14s} {layers}  {row['seconds'] * 1e3:8.1f} ms  without it "
        f"{row['ratio']:.3f}  (quartiles {first:.3f} to {third:.3f})"
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), choices=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: processor time, for a busy machine")
    parser.add_argument("--json", type=Path, help="written after every model")
    add_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Print the benefit of each path; write JSON if requested."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    header = {**setting.describe(), "rounds": options.rounds, "clock": options.clock}
    rows: list[Row] = []
    for network in options.models:
        for row in measure_paths(network, options.batch, options.rounds, options.clock, setting):
            print(in_words(row), flush=True)
            rows.append(row)
        save_json(options.json, {**header, "results": rows})


if __name__ == "__main__":
    main()
