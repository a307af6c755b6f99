"""The noise precision τ of the standardised targets of every split, with a Gamma posterior or known."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from lightning_bayes.zoo.tasks.noise import PUBLISHED_PRIOR, gamma_posterior, student_t_log_density


@final
class GammaPrecision:
    """q(τ) of Zhang et al. 2018 for every split; see `lightning_bayes.zoo.tasks.noise`."""

    def __init__(self, num_data: int, mean_square: Tensor) -> None:
        self.num_data, self.mean_square = num_data, mean_square

    def posterior(self) -> tuple[float, Tensor]:
        """Shape α and rates β ``[R]``."""
        shape, rate = gamma_posterior(torch.tensor(float(self.num_data)), self.mean_square, PUBLISHED_PRIOR)
        return float(shape), rate

    def precision(self) -> Tensor:
        """E[τ], ``[R]``."""
        shape, rate = self.posterior()
        return shape / rate

    def observe(self, residuals: Tensor) -> None:
        """Move r² towards that of a batch's residuals ``[..., R, B]``, with the batch's fraction of the data as weight."""
        batch = residuals.square().mean(-1)
        batch = batch.flatten(0, -2).mean(0) if batch.dim() > 1 else batch
        self.mean_square = self.mean_square.lerp(batch, min(1.0, residuals.shape[-1] / self.num_data))

    def log_density(self, residuals: Tensor) -> Tensor:
        """Log-density of residuals ``[..., R, m]``."""
        shape, rate = self.posterior()
        return student_t_log_density(residuals, shape, rate[:, None])


@final
class KnownPrecision:
    """A fixed τ."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def precision(self) -> Tensor:
        """τ, ``[R]``."""
        return self.values

    def observe(self, residuals: Tensor) -> None:
        """Do nothing: τ is fixed."""

    def log_density(self, residuals: Tensor) -> Tensor:
        """Log-density of residuals ``[..., R, m]``."""
        tau = self.values[:, None]
        return 0.5 * (tau.log() - math.log(2 * math.pi) - tau * residuals.square())
