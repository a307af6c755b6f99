"""The Laplace approximation of the log marginal likelihood, maximised over prior precision and noise.

    log p(D) ≈ log p(D | θ) - ½ (log det (c G + Δ) - log det Δ + θᵀ Δ θ)        Δ = diag(δ)

MacKay 1992; for networks Immer et al. 2021, https://arxiv.org/abs/2104.04975. Regression measures the curvature at σ = 1, so
noise σ scales it by c = 1/σ², or 1/σ⁴ for the empirical Fisher, which squares gradients.
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
    """The network's fit to the training data."""

    nll: float  # -Σ log p(y_i | f_i) in nats; at σ = 1 for regression
    squares: float | None  # Σ (y - f)² for regression, otherwise None
    targets: int  # number of targets


@dataclass(frozen=True)
class Evidence:
    """The log marginal likelihood as a function of prior precision and noise.

    Attributes:
        structure: The curvature.
        fit: The network's fit to the training data.
        noise_power: Exponent in c = σ^noise_power: -2, or -4 for the empirical Fisher.
    """

    structure: AbstractStructure
    fit: Fit
    noise_power: int = -2

    def factor(self, std: Tensor) -> Tensor:
        """Return the curvature factor c for noise σ."""
        return std**self.noise_power

    def log_likelihood(self, std: Tensor) -> Tensor:
        """Return log p(D | θ) for noise σ, which only regression uses."""
        if self.fit.squares is None:
            return torch.tensor(-self.fit.nll, dtype=torch.float64)
        constant = self.fit.targets * (std.log() + math.log(2 * math.pi) / 2)
        return -self.fit.squares / (2 * std.square()) - constant

    def log_marginal(self, prior: Prior, std: Tensor) -> Tensor:
        """Return the log marginal likelihood in nats, a differentiable float64 scalar, for δ by name and noise σ."""
        log_prior_terms = []  # log det Δ - θᵀ Δ θ
        for name, param in self.structure.params.items():
            squared_norm = param.detach().double().square().sum()
            log_prior_terms.append(param.numel() * prior[name].log() - prior[name] * squared_norm)
        ratio = self.structure.log_det(prior, self.factor(std)) - torch.stack(log_prior_terms).sum()
        return self.log_likelihood(std) - 0.5 * ratio


def maximise(
    evidence: Evidence, groups: list[list[str]], std: float, fixed_deltas: list[float] | None, chooses_noise: bool
) -> tuple[list[float], float]:
    """Find the prior precisions and the noise with the highest marginal likelihood.

    The marginal likelihood is concave in the logarithm of a prior precision.

    Args:
        evidence: The marginal likelihood.
        groups: Names of the parameters that share a prior precision, for each prior precision.
        std: σ, the initial value if `chooses_noise`.
        fixed_deltas: δ of each group, or None to optimise them.
        chooses_noise: Whether to optimise σ.

    Returns:
        δ of each group, and σ.
    """
    device = next(iter(evidence.structure.params.values())).device
    initial_deltas = fixed_deltas or [1.0] * len(groups)
    log_prior = torch.tensor(initial_deltas, dtype=torch.float64, device=device).log()
    log_prior.requires_grad_(fixed_deltas is None)
    log_noise = torch.tensor(std, dtype=torch.float64, device=device).log().requires_grad_(chooses_noise)
    variables = [variable for variable in (log_prior, log_noise) if variable.requires_grad]
    if not variables:
        return initial_deltas, std
    optimizer = torch.optim.LBFGS(
        variables, max_iter=_ITERATIONS, tolerance_grad=_TOLERANCE, line_search_fn="strong_wolfe"
    )

    def deltas() -> Tensor:
        return log_prior.clamp(math.log(SMALLEST), math.log(LARGEST)).exp()

    def closure() -> Tensor:
        optimizer.zero_grad()
        prior = {name: delta for group, delta in zip(groups, deltas().unbind(), strict=True) for name in group}
        loss = -evidence.log_marginal(prior, log_noise.exp())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return deltas().tolist(), float(log_noise.detach().exp())


def log_evidence(evidence: Evidence, prior: dict[str, float], std: float) -> float:
    """The log marginal likelihood in nats.

    Args:
        evidence: The marginal likelihood.
        prior: δ by parameter name.
        std: σ.

    Returns:
        The log marginal likelihood.
    """
    device = next(iter(evidence.structure.params.values())).device
    # One tensor per value: `Full.log_det` recognises a shared prior precision by identity.
    tensors = {delta: torch.tensor(delta, dtype=torch.float64, device=device) for delta in set(prior.values())}
    with torch.no_grad():
        deltas = {name: tensors[delta] for name, delta in prior.items()}
        return float(evidence.log_marginal(deltas, torch.tensor(std, dtype=torch.float64, device=device)))
