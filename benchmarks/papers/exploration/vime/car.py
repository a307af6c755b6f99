"""The mountain car with a sparse reward: 1 when it leaves the valley, otherwise 0, without a cost of actions."""

from __future__ import annotations

from typing import Any

from benchmarks.papers.exploration.environments import make, require

PATH: int = 500  # maximum time steps per episode


class Counts:
    """Number of episodes, and of episodes that reached the goal."""

    def __init__(self) -> None:
        self.episodes = self.successes = 0


def make_car(counts: Counts) -> Any:
    """Make ``MountainCarContinuous-v0`` with the sparse reward.

    Successes are counted here, because stable-baselines3 adds the value of the last state to rewards in its buffer at a time
    limit.

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
