"""The mountain car with a sparse reward: 1 where it escapes from the valley, 0 elsewhere, and no cost of actions."""

from __future__ import annotations

from typing import Any

from benchmarks.papers.exploration.environments import make, require

PATH: int = 500  # time steps of an episode at most


class Counts:
    """Episodes so far, and those that ended at the goal."""

    def __init__(self) -> None:
        self.episodes = self.successes = 0


def make_car(counts: Counts) -> Any:
    """Make ``MountainCarContinuous-v0`` with the sparse reward.

    At a time limit stable-baselines3 adds the value of the last state to the rewards in its buffer, so successes are counted
    here.

    Args:
        counts: Counts episodes and successes.

    Returns:
        The environment.
    """
    require("gymnasium")
    import gymnasium

    class SparseReward(gymnasium.Wrapper):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = self.env.step(action)
            counts.episodes += terminated or truncated
            counts.successes += terminated
            return observation, float(terminated), terminated, truncated, info

    return SparseReward(make("MountainCarContinuous-v0", max_episode_steps=PATH))
