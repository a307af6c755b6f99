"""Copies of a gymnasium environment, stepped in sequence, with actions scaled to ±1."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def require(*packages: str) -> None:
    """Require the packages of the extra `rl`.

    Args:
        *packages: Import names.

    Raises:
        ModuleNotFoundError: If a package is missing; the message lists all missing packages.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"Not installed: {', '.join(missing)}; run `pip install 'lightning-bayes[rl]'`.", name=missing[0]
        )


def make(name: str, **arguments: Any) -> Any:
    """Make a gymnasium environment.

    Args:
        name: Its name, such as ``"HalfCheetah-v5"``.
        **arguments: Arguments of ``gymnasium.make``.

    Returns:
        The environment.

    Raises:
        ModuleNotFoundError: If gymnasium or the simulator of the environment is not installed.
        ValueError: If the environment does not exist, or its actions are not bounded numbers.
    """
    require("gymnasium")
    import gymnasium

    try:
        environment = gymnasium.make(name, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(
            f"The simulator of {name} is not installed: run `pip install 'lightning-bayes[rl]'`."
        ) from error
    except gymnasium.error.Error as error:
        raise ValueError(
            f"gymnasium has no environment {name!r}: {error} See `gymnasium.pprint_registry()`."
        ) from error
    bounds = getattr(environment.action_space, "high", None)
    if bounds is None or not np.isfinite(bounds).all():
        raise ValueError(
            f"{name} has the actions {environment.action_space}, but DDPG needs bounded numbers. Choose an "
            "environment with a bounded Box of actions, such as Pendulum-v1."
        )
    return environment


class Step(NamedTuple):
    """The outcome of an action in each environment."""

    observations: Tensor  # after the action and before any reset, [n, observation]
    rewards: Tensor  # [n]
    terminated: Tensor  # whether the value of the next state is 0, [n]
    ended: list[bool]  # terminated or truncated


class Environments:
    """Copies of one environment.

    Args:
        name: Name of the environment.
        seeds: One seed per copy.
        **arguments: Arguments of ``gymnasium.make``.
    """

    def __init__(self, name: str, seeds: Sequence[int], **arguments: Any) -> None:
        self._seeds: list[int | None] = list(seeds)
        self._all = [make(name, **arguments) for _ in seeds]
        space = self._all[0].action_space
        self._middle, self._half = (space.high + space.low) / 2, (space.high - space.low) / 2

    @property
    def sides(self) -> tuple[int, int]:
        """Sizes of an observation and of an action."""
        return self._all[0].observation_space.shape[0], self._all[0].action_space.shape[0]

    def reset(self, i: int) -> Tensor:
        """Start an episode of copy `i`, with its seed the first time; returns ``[observation]``."""
        observation, _ = self._all[i].reset(seed=self._seeds[i])
        self._seeds[i] = None
        return torch.as_tensor(np.asarray(observation, np.float32))

    def reset_all(self) -> Tensor:
        """Start an episode of every copy; returns ``[n, observation]``."""
        return torch.stack([self.reset(i) for i in range(len(self._all))])

    def step(self, actions: Tensor) -> Step:
        """Act in every copy. The caller resets copies whose episode ended.

        Args:
            actions: Between -1 and 1, ``[n, action]``.

        Returns:
            The outcome.
        """
        scaled = self._middle + self._half * actions.numpy()
        results = [environment.step(action) for environment, action in zip(self._all, scaled, strict=True)]
        observations = np.stack([np.asarray(result[0], np.float32) for result in results])
        rewards, terminated = ([result[k] for result in results] for k in (1, 2))
        ended = [bool(result[2] or result[3]) for result in results]
        flags = torch.tensor(terminated, dtype=torch.float32)
        return Step(torch.from_numpy(observations), torch.tensor(rewards, dtype=torch.float32), flags, ended)

    def render(self) -> Any:
        """Render the first copy."""
        return self._all[0].render()

    def close(self) -> None:
        """Free the simulators."""
        for environment in self._all:
            environment.close()
