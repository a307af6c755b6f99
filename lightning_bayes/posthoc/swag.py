"""SWAG: a Gaussian fitted to the iterates of an optimizer, Maddox et al. 2019, https://arxiv.org/abs/1902.02476.

    θ̄ = mean_t θ_t        v = ½ (mean_t θ_t² - θ̄²)        A = [θ_t - θ̄_t]_{t in the last K} / √(2 (K - 1))

    q(θ) = N(θ̄, diag(v) + A Aᵀ)        θ̄_t: mean of the iterates up to t, K = min(R, T) of T

K and T count collected iterates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, PosteriorError, name_some
from lightning_bayes.posteriors import LowRankGaussian

LEAST_VARIANCE = 1e-12  # for weights that did not move, where rounding can make mean_t θ_t² - θ̄² negative


@final
class SWAG:
    """Collects the iterates of an optimizer and fits a low-rank Gaussian to them.

    Args:
        max_rank: R, the number of most recent deviations to keep, at least 2.

    Attributes:
        count: Number of iterates collected.

    Raises:
        HyperparameterError: If the rank is too small.
    """

    def __init__(self, max_rank: int = 20) -> None:
        if max_rank < 2 or max_rank != int(max_rank):
            raise HyperparameterError(f"max_rank={max_rank!r} must be a whole number of at least 2.")
        self.max_rank, self.count = max_rank, 0
        self._mean: dict[str, Tensor] = {}
        self._square: dict[str, Tensor] = {}
        self._deviations: dict[str, list[Tensor]] = {}

    def collect(self, weights: Mapping[str, Tensor]) -> None:
        """Add one iterate θ_t, by parameter name.

        Raises:
            PosteriorError: If it has other names than the iterates before.
        """
        if self.count and (others := weights.keys() ^ self._mean.keys()):
            raise PosteriorError(
                f"This iterate and those before differ in {name_some(sorted(others))}. Collect the same weights each time, "
                "and pass weights that were constant until now to add_constant first."
            )
        self.count += 1
        for name, value in weights.items():
            exact = value.detach().double()  # mean_t θ_t² - θ̄² loses digits
            mean = self._mean.setdefault(name, torch.zeros_like(exact))
            mean.lerp_(exact, 1 / self.count)
            self._square.setdefault(name, torch.zeros_like(exact)).lerp_(exact.square(), 1 / self.count)
            deviations = self._deviations.setdefault(name, [])
            deviations.append((exact - mean).to(value.dtype))
            del deviations[: -self.max_rank]

    def add_constant(self, weights: Mapping[str, Tensor]) -> None:
        """Add weights that had these values in all iterates so far, such as those of a layer that is unfrozen now."""
        for name, value in weights.items():
            exact = value.detach().double()
            self._mean[name], self._square[name] = exact.clone(), exact.square()
            self._deviations[name] = [torch.zeros_like(value) for _ in range(min(self.count, self.max_rank))]

    def is_collected(self, name: str) -> bool:
        """Whether iterates have a weight of this name."""
        return name in self._mean

    def posterior(
        self,
        num_data: float,
        prior_precision: dict[str, float],
        constants: Mapping[str, Tensor] | None = None,
    ) -> LowRankGaussian:
        """Fit the Gaussian to the iterates.

        Args:
            num_data: N.
            prior_precision: δ by parameter name, for the KL divergence.
            constants: Other tensors that prediction needs, such as buffers.

        Returns:
            The posterior.

        Raises:
            PosteriorError: If there are fewer than two iterates.
        """
        if self.count < 2:
            raise PosteriorError(
                f"SWAG needs at least 2 iterates, but has {self.count}. Collect earlier or more often."
            )
        rank = min(len(kept) for kept in self._deviations.values())  # fewer than R after a resume with a larger R
        scale = (2 * (rank - 1)) ** -0.5
        mean, variance, deviations = {}, {}, {}
        for name, exact in self._mean.items():
            dtype = self._deviations[name][0].dtype
            mean[name] = exact.to(dtype)
            variance[name] = ((self._square[name] - exact.square()) / 2).clamp_min(LEAST_VARIANCE).to(dtype)
            deviations[name] = torch.stack(self._deviations[name][-rank:]) * scale
        return LowRankGaussian(mean, variance, deviations, prior_precision, num_data, dict(constants or {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of the iterates, safe for ``torch.load(..., weights_only=True)``."""
        return {
            "count": self.count,
            "mean": self._mean,
            "square": self._square,
            "deviations": self._deviations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the moments from the result of `state_dict`."""
        self.count = state["count"]
        self._mean, self._square = dict(state["mean"]), dict(state["square"])
        self._deviations = {name: list(deviations) for name, deviations in state["deviations"].items()}
