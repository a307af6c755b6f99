"""VIME on the mountain car with a sparse reward, Zhang et al. 2018, Fig. 3.

    python -m benchmarks.papers.exploration.vime [--methods none bbb mvg] [--seeds 5] [--first-seed 0] [--iterations 60]
        [--steps 5000] [--updates 500] [--json FILE] [--figure FILE.png]

TRPO is that of sb3-contrib, unmodified, with a policy of 32 tanh units. JSON is written after each run; finished runs are
skipped. The benchmark needs the extra ``rl``: ``pip install 'lightning-bayes[rl]'``.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.papers.exploration.environments import require
from benchmarks.papers.exploration.vime.car import Counts, make_car
from benchmarks.papers.exploration.vime.dynamics import Dynamics
from benchmarks.papers.exploration.vime.figure import draw
from benchmarks.papers.exploration.vime.report import TITLES, Row, promises, table
from benchmarks.provenance import provenance

COPIES: Final = 10  # parallel copies of the environment


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(TITLES), choices=TITLES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5000, help=f"time steps per iteration, a multiple of {COPIES}")
    parser.add_argument("--updates", type=int, default=500, help="updates of the dynamics after each iteration")
    parser.add_argument("--json", type=Path, help="written after each run; finished runs are skipped")
    parser.add_argument("--figure", type=Path)
    return parser


def run(method: str, seed: int, options: argparse.Namespace) -> Row:
    """Run one method with one seed.

    Args:
        method: ``"none"``, ``"bbb"`` or ``"mvg"``.
        seed: Seed of the policy, the environment and the dynamics.
        options: The command line.

    Returns:
        Episodes, successes and the error of the dynamics in each iteration.
    """
    require("stable_baselines3", "sb3_contrib")
    from sb3_contrib import TRPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    from benchmarks.papers.exploration.vime.bonus import InformationGain, Tally

    counts, start = Counts(), time.perf_counter()
    cars = DummyVecEnv([lambda: make_car(counts)] * COPIES)
    dynamics = None if method == "none" else Dynamics(method, state=2, action=1, seed=seed)
    bonus, tally = InformationGain(dynamics, options.updates), Tally(counts)
    model = TRPO(
        "MlpPolicy",
        cars,
        n_steps=options.steps // COPIES,
        batch_size=min(500, options.steps),
        gamma=0.99,
        gae_lambda=1.0,
        target_kl=0.01,
        policy_kwargs={"net_arch": [32]},
        seed=seed,
        device="cpu",
    )
    model.learn(options.iterations * options.steps, callback=[bonus, tally])
    of_iterations = {"episodes": tally.episodes, "successes": tally.successes, "errors": bonus.errors}
    return {"method": method, "seed": seed, **of_iterations, "seconds": time.perf_counter() - start}


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    setting = {name: getattr(options, name) for name in ("iterations", "steps", "updates")}
    saved: dict[str, Any] = {**provenance(), "setting": setting, "results": []}
    if options.json and options.json.exists():
        saved = json.loads(options.json.read_text("utf-8"))
    rows: list[Row] = saved["results"]
    done = {(row["method"], row["seed"]) for row in rows}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed, method in product(seeds, options.methods):
        if (method, seed) in done:
            continue
        row = run(method, seed, options)
        rows.append(row)
        print(f"{method}, seed {seed}, {row['seconds']:.0f} s: {row['successes']}", flush=True)
        if options.json:
            packages = {name: version(name) for name in ("gymnasium", "stable-baselines3", "sb3-contrib")}
            options.json.write_text(json.dumps({**saved, **packages}) + "\n", "utf-8")
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows)))
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
