"""The information gain as a reward for unmodified on-policy algorithms of stable-baselines3.

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

WEIGHT: Final = 1e-4  # η; sufficient for rare rewards, because advantages are normalised
LARGEST: Final = 1000.0
MEDIANS: Final = 10


class InformationGain(BaseCallback):  # type: ignore[misc]
    """Adds η KL to the rewards of every rollout except the first, then trains the dynamics on the rollout.

    As in the released code, gains are clipped at 1000 and divided by the mean of the medians of the last ten rollouts.

    Args:
        dynamics: The dynamics model; None for no bonus.
        updates: Updates of the model after each rollout.
    """

    def __init__(self, dynamics: Dynamics | None, updates: int = 500) -> None:
        super().__init__()
        self.dynamics, self.updates = dynamics, updates
        self.medians: deque[float] = deque(maxlen=MEDIANS)
        self.errors: list[float] = []  # of the dynamics model after each rollout
        self._following: list[Any] = []

    def _on_rollout_start(self) -> None:
        self._following.clear()

    def _on_step(self) -> bool:
        """Record the next states: at the end of an episode, the buffer has the first state of the next one."""
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
        """The transitions of the rollout, with the actions clipped as in the environment."""
        buffer, space = self.model.rollout_buffer, self.model.action_space
        actions = np.clip(buffer.actions, space.low, space.high)
        inputs, following = np.concatenate([buffer.observations, actions], -1), np.stack(self._following)
        return Moves(*(torch.as_tensor(part, dtype=torch.float32).flatten(0, 1) for part in (inputs, following)))


class Tally(BaseCallback):  # type: ignore[misc]
    """Records episodes and successes per rollout.

    Args:
        counts: The counts of the environment.
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
