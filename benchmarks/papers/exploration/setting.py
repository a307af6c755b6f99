"""The settings of Khan et al. 2018, App. K, with smaller defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BATCH: Final = 64  # M
NUM_DATA: Final = BATCH**2  # makes the gradient of the mean equivalent to the gradient of the sum in the authors' code
MAX_NOISE: Final = 1e-2  # c = 1e4 in the code
START_PRECISION: Final = 1e4  # initial precision of VadaGrad and of the exploring baselines


@dataclass(frozen=True)
class Setting:
    """Settings shared by all methods.

    Attributes:
        environment: Name of the gymnasium environment.
        seeds: Number of seeds per method; all train at once.
        steps: Time steps per seed; after the first `BATCH`, each makes one update.
        hidden: Units of the two hidden layers; 400 and 300 in the paper.
        test_every: Time steps between tests.
        test_episodes: Episodes per test, which uses the mean.
        discount: γ.
        target_rate: τ, the update rate of the target networks.
        critic_lr: Learning rate of the critic's Adam.
    """

    environment: str = "HalfCheetah-v5"
    seeds: int = 5
    steps: int = 100_000
    hidden: tuple[int, int] = (64, 64)
    test_every: int = 5000
    test_episodes: int = 5
    discount: float = 0.99
    target_rate: float = 1e-3
    critic_lr: float = 1e-3
