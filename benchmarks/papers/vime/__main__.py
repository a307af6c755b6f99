"""VIME on the mountain car with a sparse reward, Zhang et al. 2018, Figure 3.

    python -m benchmarks.papers.vime [--methods none bbb mvg] [--seeds 10] [--iterations 100] [--steps 5000]
        [--updates 500] [--json FILE]

The policy is trained by TRPO of sb3-contrib, unmodified, with 32 tanh units. A dynamics model with a mean-field (bbb) or a
matrix-variate (mvg) posterior adds η times its information gain to the rewards. The reward is 1 when the car leaves the
valley; `MountainCarContinuous-v0` without a cost of actions replaces rllab's car. The text states no numbers: the baseline
rarely succeeds, both posteriors do, and the matrix-variate one earlier.

JSON is written after each run; finished runs are skipped. Needs ``sb3-contrib`` and ``gymnasium``, of the extra ``bench``.
An iteration takes 1 s of a core without a bonus and 4 s with one; ten seeds of 100 iterations take two and a half hours.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from sb3_contrib import TRPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.papers.vime.dynamics import Dynamics, Moves
from benchmarks.provenance import save_json, saved_rows

TITLES: Final = {"none": "no bonus", "bbb": "VIME, mean-field (BBB)", "mvg": "VIME, matrix-variate"}
COPIES: Final = 10  # parallel copies of the environment
PATH: Final = 500  # maximum time steps per episode
WEIGHT: Final = 1e-4  # η; sufficient for rare rewards, because advantages are normalised
LARGEST: Final = 1000.0  # gains are clipped here, as in the released code
MEDIANS: Final = 10  # and divided by the mean of the medians of as many rollouts
Row = dict[str, Any]


class SparseCar(gymnasium.Wrapper):  # type: ignore[type-arg]
    """The mountain car with the reward 1 at the goal and 0 elsewhere.

    It counts successes itself, because stable-baselines3 adds the value of the last state to rewards at a time limit.
    """

    def __init__(self) -> None:
        super().__init__(gymnasium.make("MountainCarContinuous-v0", max_episode_steps=PATH))
        self.episodes = self.successes = 0

    def step(self, action: Any) -> Any:
        """One step."""
        observation, _, terminated, truncated, info = self.env.step(action)
        self.episodes += terminated or truncated
        self.successes += terminated
        return observation, float(terminated), terminated, truncated, info


class InformationGain(BaseCallback):
    """Adds η KL to the rewards of every rollout except the first, then trains the dynamics on the rollout."""

    def __init__(self, dynamics: Dynamics | None, cars: list[SparseCar], updates: int) -> None:
        super().__init__()
        self.dynamics, self.cars, self.updates = dynamics, cars, updates
        self.medians: deque[float] = deque(maxlen=MEDIANS)
        self.history: dict[str, list[float]] = {"episodes": [], "successes": [], "errors": []}
        self._following: list[Any] = []

    def _on_rollout_start(self) -> None:
        self._following.clear()

    def _on_step(self) -> bool:
        """Record the next states: at the end of an episode, the buffer has the first state of the next one."""
        new, infos = self.locals["new_obs"], self.locals["infos"]
        ends = [info.get("terminal_observation") for info in infos]
        self._following.append(np.stack([row if end is None else end for row, end in zip(new, ends, strict=True)]))
        return True

    def _on_rollout_end(self) -> None:
        for name in ("episodes", "successes"):
            self.history[name].append(sum(getattr(car, name) for car in self.cars) - sum(self.history[name]))
        if self.dynamics is None:
            return
        buffer: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        moves = self.moves()
        if len(self.dynamics.pool.inputs):
            gain = self.dynamics.gain(moves).clamp_max(LARGEST)
            self.medians.append(float(gain.median()))
            scale = WEIGHT / (sum(self.medians) / len(self.medians))
            buffer.rewards += (scale * gain).numpy().reshape(buffer.rewards.shape)
            buffer.compute_returns_and_advantage(last_values=self.locals["values"], dones=self.locals["dones"])
        self.dynamics.add(moves)
        self.history["errors"].append(self.dynamics.train(self.updates))

    def moves(self) -> Moves:
        """The transitions of the rollout, with the actions clipped as in the environment."""
        buffer: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        space: Any = self.model.action_space
        inputs = np.concatenate([buffer.observations, np.clip(buffer.actions, space.low, space.high)], -1)
        parts = (inputs, np.stack(self._following))
        return Moves(*(torch.as_tensor(part, dtype=torch.float32).flatten(0, 1) for part in parts))


def run(method: str, seed: int, options: argparse.Namespace) -> Row:
    """Episodes, successes and the error of the dynamics in each iteration."""
    start, cars = time.process_time(), [SparseCar() for _ in range(COPIES)]
    dynamics = None if method == "none" else Dynamics(method, state=2, action=1, seed=seed)
    bonus = InformationGain(dynamics, cars, options.updates)
    model = TRPO(
        "MlpPolicy",
        DummyVecEnv([lambda car=car: car for car in cars]),  # type: ignore[misc]
        n_steps=options.steps // COPIES,
        batch_size=min(500, options.steps),
        gamma=0.99,
        gae_lambda=1.0,
        target_kl=0.01,
        policy_kwargs={"net_arch": [32]},
        seed=seed,
        device="cpu",
    )
    model.learn(options.iterations * options.steps, callback=bonus)
    return {**bonus.history, "seconds": time.process_time() - start}


def table(rows: list[Row]) -> str:
    """Format a Markdown table of successes and episodes."""
    lines = ["| method | iterations | successes of each seed | of all episodes |", "| --- | ---: | --- | ---: |"]
    for method, title in TITLES.items():
        runs = [row for row in rows if row["method"] == method]
        if runs:
            by_seed = [sum(row["successes"]) for row in runs]
            cells = [title, str(runs[0]["iterations"]), ", ".join(f"{count:.0f}" for count in by_seed)]
            cells.append(f"{sum(by_seed):.0f} of {sum(sum(row['episodes']) for row in runs):.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def more(rows: list[Row], rival: str) -> str:
    """On how many seeds the matrix-variate posterior has more successes than a rival."""
    found = {(row["method"], row["seed"]): sum(row["successes"]) for row in rows}
    both = [seed for method, seed in found if method == "mvg" and (rival, seed) in found]
    better = [seed for seed in both if found["mvg", seed] > found[rival, seed]]
    return f"matrix-variate has more successes than {TITLES[rival]} on {len(better)} of {len(both)} seeds"


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(TITLES), choices=TITLES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5000, help=f"time steps per iteration, a multiple of {COPIES}")
    parser.add_argument("--updates", type=int, default=500, help="updates of the dynamics after each iteration")
    parser.add_argument("--json", type=Path, help="written after each run; finished runs are skipped")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = {name: getattr(options, name) for name in ("iterations", "steps", "updates")}
    rows: list[Row] = saved_rows(options.json)
    for seed, method in product(range(options.seeds), options.methods):
        key = {"method": method, "seed": seed, **setting}
        if not any(key.items() <= row.items() for row in rows):
            rows.append({**key, **run(method, seed, options)})
            print(f"{method}, seed {seed}: {rows[-1]['successes']}", flush=True)
            save_json(options.json, {"results": rows})
    print(table(rows))
    print("\n".join(f"- {more(rows, rival)}" for rival in ("none", "bbb")))


if __name__ == "__main__":
    main()
