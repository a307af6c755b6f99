"""The Laplace approximation of the log marginal likelihood, and the prior precision and noise that maximise it.

    log p(D) ≈ log p(D | θ) - ½ (log det (c G + Δ) - log det Δ + θᵀ Δ θ)        Δ = diag(δ)

MacKay 1992; for networks Immer et al. 2021, https://arxiv.org/abs/2104.04975. For regression with noise σ, the curvature
that was measured at σ = 1 has the factor c = 1/σ², and 1/σ⁴ for the empirical Fisher, which squares gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.posthoc.structure import AbstractStructure, Prior

SMALLEST, LARGEST = 1e-8, 1e8  # bounds of prior precisions and of 1/σ²
_ITERATIONS = 200
_TOLERANCE = 1e-9  # of the gradient per parameter group, in nats


class Fit(NamedTuple):
    """How the network fits the training data.

    Attributes:
        nll: -Σ log p(y_i | f_i) in nats; for regression at σ = 1.
        squares: Σ (y - f)², for regression with noise; else None.
        targets: Number of targets.
    """

    nll: float
    squares: float | None
    targets: int


@dataclass(frozen=True)
class Evidence:
    """The terms of the log marginal likelihood.

    Attributes:
        structure: The curvature.
        fit: The training data.
        noise_power: c = σ^noise_power; -2, or -4 for the empirical Fisher.
    """

    structure: AbstractStructure
    fit: Fit
    noise_power: int = -2

    def factor(self, std: Tensor) -> Tensor:
        """C at a noise σ."""
        return std**self.noise_power

    def log_likelihood(self, std: Tensor) -> Tensor:
        """Log p(D | θ) at a noise σ, which counts in regression only."""
        if self.fit.squares is None:
            return torch.tensor(-self.fit.nll, dtype=torch.float64)
        constant = self.fit.targets * (std.log() + math.log(2 * math.pi) / 2)
        return -self.fit.squares / (2 * std.square()) - constant

    def log_marginal(self, prior: Prior, std: Tensor) -> Tensor:
        """The log marginal likelihood in nats, differentiable.

        Args:
            prior: δ by parameter name.
            std: σ; 1 where there is no noise to choose.

        Returns:
            A scalar in float64.
        """
        params = self.structure.params
        of_prior = [param.numel() * prior[name].log() - prior[name] * _norm(param) for name, param in params.items()]
        ratio = self.structure.log_det(prior, self.factor(std)) - torch.stack(of_prior).sum()
        return self.log_likelihood(std) - 0.5 * ratio


def maximise(
    evidence: Evidence, groups: list[list[str]], std: float, start: list[float] | None, chooses_noise: bool
) -> tuple[list[float], float]:
    """The prior precisions, and the noise, of the highest marginal likelihood.

    It is concave in the logarithm of a prior precision.

    Args:
        evidence: The marginal likelihood.
        groups: Names of the parameters that share a prior precision.
        std: σ to start with.
        start: δ of each group to keep; None to choose them.
        chooses_noise: Whether σ is chosen.

    Returns:
        δ of each group, and σ.
    """
    device = next(iter(evidence.structure.params.values())).device
    first = start or [1.0] * len(groups)
    log_prior = torch.tensor(first, dtype=torch.float64, device=device).log().requires_grad_(start is None)
    log_noise = torch.tensor(std, dtype=torch.float64, device=device).log().requires_grad_(chooses_noise)
    chosen = [variable for variable in (log_prior, log_noise) if variable.requires_grad]
    if not chosen:
        return first, std
    optimizer = torch.optim.LBFGS(
        chosen, max_iter=_ITERATIONS, tolerance_grad=_TOLERANCE, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        deltas = log_prior.clamp(math.log(SMALLEST), math.log(LARGEST)).exp().unbind()
        prior = {name: delta for group, delta in zip(groups, deltas, strict=True) for name in group}
        loss = -evidence.log_marginal(prior, log_noise.exp())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = log_prior.detach().clamp(math.log(SMALLEST), math.log(LARGEST)).exp()
    return found.tolist(), float(log_noise.detach().exp())


def log_evidence(evidence: Evidence, prior: dict[str, float], std: float) -> float:
    """The log marginal likelihood in nats.

    Args:
        evidence: The marginal likelihood.
        prior: δ by parameter name.
        std: σ.

    Returns:
        A number.
    """
    device = next(iter(evidence.structure.params.values())).device
    same = {value: torch.tensor(value, dtype=torch.float64, device=device) for value in set(prior.values())}
    with torch.no_grad():
        deltas = {name: same[value] for name, value in prior.items()}
        return float(evidence.log_marginal(deltas, torch.tensor(std, dtype=torch.float64, device=device)))


def _norm(param: Tensor) -> Tensor:
    return param.detach().double().square().sum()
