"""The replay buffer: the transitions of all runs in one tensor."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor


class Transitions(NamedTuple):
    """A batch of transitions from each run, ``[R, B, ...]``."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    following: Tensor


@final
class Replay:
    """All transitions so far; none are dropped.

    Args:
        runs: R.
        capacity: Transitions per run.
        observation: Size of an observation.
        action: Size of an action.
    """

    def __init__(self, runs: int, capacity: int, observation: int, action: int) -> None:
        self._widths = (observation, action, 1, 1, observation)
        self._all = torch.empty(runs, capacity, sum(self._widths))
        self._runs = torch.arange(runs)[:, None]
        self.length = 0

    def add(self, *parts: Tensor) -> None:
        """Add one transition of each run: observations, actions, rewards, terminated, following; ``[R, ...]``."""
        columns = [part if part.dim() == 2 else part[:, None] for part in parts]
        self._all[:, self.length] = torch.cat(columns, 1)
        self.length += 1

    def at(self, rows: Tensor) -> Transitions:
        """Transitions by index, ``[R, B]``."""
        first, actions, rewards, terminated, following = self._all[self._runs, rows].split(self._widths, -1)
        return Transitions(first, actions, rewards[..., 0], terminated[..., 0], following)
