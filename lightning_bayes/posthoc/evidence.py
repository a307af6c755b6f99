"""The Laplace approximation of the log marginal likelihood, maximised over prior precision and noise.

    log p(D) ≈ log p(D | θ) - ½ (log det (c G + Δ) - log det Δ + θᵀ Δ θ)        Δ = diag(δ)

MacKay 1992; for networks Immer et al. 2021, https://arxiv.org/abs/2104.04975. Regression measures the curvature at σ = 1, so
noise σ scales it by c = 1/σ², or 1/σ⁴ for the empirical Fisher, which squares gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bayes.curvature.likelihood import Gaussian
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
        noise_power: Exponent in c = σ^noise_power: -2, or -4 for the empirical Fisher.
    """

    structure: AbstractStructure
    fit: TrainingFit
    noise_power: int = -2

    def log_likelihood(self, std: Tensor) -> Tensor:
        """Return log p(D | θ) for noise σ, which only regression uses."""
        if not isinstance(self.fit.likelihood, Gaussian):
            return torch.tensor(-self.fit.nll, dtype=torch.float64)
        constant = self.fit.targets * (std.log() + math.log(2 * math.pi) / 2)
        return -self.fit.squares / (2 * std.square()) - constant

    def log_marginal(self, prior: Prior, std: Tensor) -> Tensor:
        """Return the log marginal likelihood in nats, a differentiable float64 scalar, for δ by name and noise σ."""
        log_prior_terms = []  # log det Δ - θᵀ Δ θ
        for name, param in self.structure.params.items():
            squared_norm = param.detach().double().square().sum()
            log_prior_terms.append(param.numel() * prior[name].log() - prior[name] * squared_norm)
        ratio = self.structure.log_det(prior, std**self.noise_power) - torch.stack(log_prior_terms).sum()
        return self.log_likelihood(std) - 0.5 * ratio

    def posterior(self, prior: dict[str, float], std: float) -> AbstractPosterior:
        """Return the posterior for δ by name and noise σ."""
        return self.structure.posterior(prior, std**self.noise_power, self.fit.examples)


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
