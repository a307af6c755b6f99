"""The information gain as a reward, for an unmodified on-policy algorithm of stable-baselines3.

model = sb3_contrib.TRPO("MlpPolicy", environment, ...)
model.learn(steps, callback=InformationGain(dynamics))
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
import torch

from benchmarks.papers.exploration.environments import require
from benchmarks.papers.exploration.vime.car import Counts
from benchmarks.papers.exploration.vime.dynamics import Dynamics, Moves

require("stable_baselines3", "sb3_contrib")

from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402

WEIGHT: Final = 1e-4  # η; enough where rewards are rare, because advantages are normalised
LARGEST: Final = 1000.0
MEDIANS: Final = 10


class InformationGain(BaseCallback):  # type: ignore[misc]
    """Adds η KL to the rewards of each rollout but the first, then trains the dynamics on it.

    As in the released code, a gain counts at most 1000 and is divided by the mean of the medians of the last ten rollouts.

    Args:
        dynamics: The model; None for no bonus.
        updates: Its updates after each rollout.
    """

    def __init__(self, dynamics: Dynamics | None, updates: int = 500) -> None:
        super().__init__()
        self.dynamics, self.updates = dynamics, updates
        self.medians: deque[float] = deque(maxlen=MEDIANS)
        self.errors: list[float] = []  # of the dynamics after each rollout
        self._following: list[Any] = []

    def _on_rollout_start(self) -> None:
        self._following.clear()

    def _on_step(self) -> bool:
        """Note the following states: where an episode ends, the buffer holds the next one's first."""
        new, infos = self.locals["new_obs"], self.locals["infos"]
        ends = [info.get("terminal_observation") if info else None for info in infos]
        self._following.append(np.stack([row if end is None else end for row, end in zip(new, ends, strict=True)]))
        return True

    def _on_rollout_end(self) -> None:
        if self.dynamics is None:
            return
        buffer, moves = self.model.rollout_buffer, self.moves()
        if len(self.dynamics.pool.inputs):
            gain = self.dynamics.gain(moves).clamp_max(LARGEST)
            self.medians.append(float(gain.median()))
            scale = WEIGHT / (sum(self.medians) / len(self.medians))
            buffer.rewards += (scale * gain).numpy().reshape(buffer.rewards.shape)
            buffer.compute_returns_and_advantage(last_values=self.locals["values"], dones=self.locals["dones"])
        self.dynamics.add(moves)
        self.errors.append(self.dynamics.train(self.updates))

    def moves(self) -> Moves:
        """The transitions of the rollout, with the actions that the environment has seen."""
        buffer, space = self.model.rollout_buffer, self.model.action_space
        actions = np.clip(buffer.actions, space.low, space.high)
        inputs, following = np.concatenate([buffer.observations, actions], -1), np.stack(self._following)
        return Moves(*(torch.as_tensor(part, dtype=torch.float32).flatten(0, 1) for part in (inputs, following)))


class Tally(BaseCallback):  # type: ignore[misc]
    """Notes episodes and successes of each rollout.

    Args:
        counts: Of the environment.
    """

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self.episodes: list[int] = []
        self.successes: list[int] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.episodes.append(self.counts.episodes - sum(self.episodes))
        self.successes.append(self.counts.successes - sum(self.successes))
