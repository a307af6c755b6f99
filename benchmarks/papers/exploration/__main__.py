"""DDPG with noise in the actor's weights, Khan et al. 2018, Figs. 3, 5 and 6.

    python -m benchmarks.papers.exploration [--environment HalfCheetah-v5] [--methods vadam adam_plain] [--seeds 5]
        [--steps 100000] [--hidden 64 64] [--json FILE] [--figure FILE.png] [--policy FILE.pt]

All methods and seeds train at once on one core. ``--json`` is written after each test; if the file exists, its results are
shown and nothing is run. ``--policy`` saves the actor with the best last test for `benchmarks.papers.exploration.film`. The
environments need the extra ``rl``: ``pip install 'lightning-bayes[rl]'``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.papers.exploration.environments import require
from benchmarks.papers.exploration.explorers import METHODS
from benchmarks.papers.exploration.figures import draw_curves
from benchmarks.papers.exploration.report import orders, table
from benchmarks.papers.exploration.setting import Setting
from benchmarks.papers.exploration.training import Curve, train
from benchmarks.provenance import provenance


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default=Setting.environment)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=Setting.seeds)
    parser.add_argument("--steps", type=int, default=Setting.steps, help="time steps per run")
    parser.add_argument("--hidden", type=int, nargs=2, default=Setting.hidden)
    parser.add_argument("--test-every", type=int, default=Setting.test_every, help="time steps between tests")
    parser.add_argument("--test-episodes", type=int, default=Setting.test_episodes)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="learning curves")
    parser.add_argument("--policy", type=Path, help="the actor with the best last test")
    return parser


def as_json(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """The results without the weights."""
    return {name: {"steps": c.steps, "returns": c.returns, "noise": c.noise} for name, c in curves.items()}


def best_policy(curves: Mapping[str, Curve], setting: Setting) -> dict[str, Any]:
    """The actor with the best last test, and its origin."""
    best_return, name, seed = max(
        (value, name, seed) for name, curve in curves.items() for seed, value in enumerate(curve.returns[-1])
    )
    shared = {"environment": setting.environment, "hidden": list(setting.hidden), "return": best_return}
    title = f"{METHODS[name].title}, seed {seed}, {curves[name].steps[-1]} time steps"
    return {**shared, "title": title, "weights": curves[name].actors[seed].clone()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and save the requested files after each test."""
    require("gymnasium")
    names = ("environment", "seeds", "steps", "test_every", "test_episodes")
    setting = Setting(**{name: getattr(options, name) for name in names}, hidden=tuple(options.hidden))
    packages = ("gymnasium", "mujoco") if find_spec("mujoco") else ("gymnasium",)
    record: dict[str, Any] = {**provenance(), **{name: version(name) for name in packages}, "setting": asdict(setting)}
    start = time.perf_counter()
    for curves in train(options.methods, setting):
        record |= {"seconds": time.perf_counter() - start, "results": as_json(curves)}
        now = ", ".join(f"{name} {fmean(curve.returns[-1]):.0f}" for name, curve in curves.items())
        print(f"{curves[options.methods[0]].steps[-1]} steps, {record['seconds']:.0f} s: {now}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(record) + "\n", "utf-8")
        if options.policy:
            torch.save(best_policy(curves, setting), options.policy)
    return record


def main(arguments: list[str] | None = None) -> None:
    """Train, or read the results from the file, and print the table."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    exists = options.json is not None and options.json.exists()
    record = json.loads(options.json.read_text("utf-8")) if exists else measure(options)
    setting, results = record["setting"], record["results"]
    steps = max(result["steps"][-1] for result in results.values())
    print(f"{setting['environment']}, {setting['seeds']} seeds, {steps} time steps, {record['seconds']:.0f} s")
    print(table(results))
    print("\n".join(f"- {line}" for line in orders(results)))
    if options.figure:
        draw_curves(results, options.figure)


if __name__ == "__main__":
    main()
