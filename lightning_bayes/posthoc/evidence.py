"""The Laplace approximation of the log marginal likelihood, maximised over prior precision and noise.

    log p(D) ≈ log p(D | θ) - ½ (log det (c G + Δ) - log det Δ + θᵀ Δ θ)        Δ = diag(δ)

MacKay 1992; for networks Immer et al. 2021, https://arxiv.org/abs/2104.04975. Regression measures the curvature at the noise
σ₁ of each output, so noise σ σ₁ scales it by c = 1/σ², or 1/σ⁴ for the empirical Fisher, of squared gradients. A loss that
divides by the sum of its targets' weights has c = n/Σw. With weights, -log p(D | θ) is the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihood import Gaussian
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc.structure import AbstractStructure, Prior
from lightning_bayes.posthoc.trained import TrainingFit

RANGE = (1e-8, 1e8)  # bounds of prior precisions and of 1/σ²
_ITERATIONS = 200
_TOLERANCE = 1e-9  # of the gradient per parameter group, in nats


@dataclass(frozen=True)
class Evidence:
    """The log marginal likelihood as a function of prior precision and noise.

    Attributes:
        structure: The curvature.
        fit: The network's fit to the training data.
        power: Of 1/σ² and n/Σw in c: 1, or 2 for the empirical Fisher.
    """

    structure: AbstractStructure
    fit: TrainingFit
    power: int = 1

    def log_likelihood(self, std: Tensor) -> Tensor:
        """Return log p(D | θ) for noise σ σ₁; σ is used by regression alone."""
        if not isinstance(self.fit.kind, Gaussian):
            return torch.tensor(-self.fit.loss * self.fit.scale, dtype=torch.float64)
        # The loss at σ = 1 is Σ ½ ((y - f)/σ₁)² + log σ₁ + ½ log 2π.
        return -self.fit.standardised / (2 * std.square()) - self.fit.count * std.log() - self.fit.log_noise

    def factor(self, std: Tensor | float) -> Any:
        """C for noise σ σ₁."""
        return (self.fit.scale / std**2) ** self.power

    def log_marginal(self, prior: Prior, std: Tensor) -> Tensor:
        """Return the log marginal likelihood in nats, a differentiable float64 scalar, for δ by name and noise σ."""
        log_prior_terms = []  # log det Δ - θᵀ Δ θ
        for name, param in self.structure.params.items():
            squared_norm = param.detach().double().square().sum()
            log_prior_terms.append(param.numel() * prior[name].log() - prior[name] * squared_norm)
        ratio = self.structure.log_det(prior, self.factor(std)) - torch.stack(log_prior_terms).sum()
        return self.log_likelihood(std) - 0.5 * ratio

    def posterior(self, prior: dict[str, float], std: float) -> AbstractPosterior:
        """Return the posterior for δ by name and noise σ."""
        return self.structure.posterior(prior, self.factor(std), self.fit.examples)


def maximise(
    evidence: Evidence, groups: dict[str, int], std: float, delta: float | None, chooses_noise: bool
) -> tuple[list[float], float]:
    """Find the prior precisions and the noise with the highest marginal likelihood."""
    device = next(iter(evidence.structure.params.values())).device
    initial = [1.0 if delta is None else delta] * (1 + max(groups.values()))
    log_prior = torch.tensor(initial, dtype=torch.float64, device=device).log().requires_grad_(delta is None)
    log_noise = torch.tensor(std, dtype=torch.float64, device=device).log().requires_grad_(chooses_noise)
    variables = [variable for variable in (log_prior, log_noise) if variable.requires_grad]
    if not variables:
        return initial, std
    optimizer = torch.optim.LBFGS(
        variables, max_iter=_ITERATIONS, tolerance_grad=_TOLERANCE, line_search_fn="strong_wolfe"
    )

    def deltas() -> Tensor:
        return log_prior.clamp(*map(math.log, RANGE)).exp()

    def closure() -> Tensor:
        optimizer.zero_grad()
        values = deltas().unbind()
        prior = {name: values[index] for name, index in groups.items()}
        loss = -evidence.log_marginal(prior, log_noise.exp())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return deltas().tolist(), float(log_noise.detach().exp())


def log_evidence(evidence: Evidence, prior: dict[str, float], std: float) -> float:
    """The log marginal likelihood in nats, for δ by parameter name and σ."""
    device = next(iter(evidence.structure.params.values())).device
    # One tensor per value: `Full.log_det` recognises a shared prior precision by identity.
    tensors = {delta: torch.tensor(delta, dtype=torch.float64, device=device) for delta in set(prior.values())}
    with torch.no_grad():
        deltas = {name: tensors[delta] for name, delta in prior.items()}
        return float(evidence.log_marginal(deltas, torch.tensor(std, dtype=torch.float64, device=device)))
