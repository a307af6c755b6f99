"""The settings of Khan et al. 2018, App. K, and the smaller ones that run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BATCH: Final = 64  # M
NUM_DATA: Final = BATCH**2  # with it the gradient of the mean does what the authors' code does with that of the sum
MAX_NOISE: Final = 1e-2  # c = 1e4 in the code
START_PRECISION: Final = 1e4  # s₁ of VadaGrad, and of the exploring baselines


@dataclass(frozen=True)
class Setting:
    """What all methods share.

    Attributes:
        environment: Name of the gymnasium environment.
        seeds: Seeds of each method, which train at once.
        steps: Time steps of each seed; each is one update after the first `BATCH`.
        hidden: Units of both hidden layers; 400 and 300 in the paper.
        test_every: Time steps between tests.
        test_episodes: Episodes of a test, with actions of the mean.
        discount: γ.
        target_rate: τ, of the target networks.
        critic_lr: Of the critic's Adam.
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
