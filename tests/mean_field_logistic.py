"""Bayesian logistic regression under a mean-field Gaussian: expectations by quadrature, the optimum by L-BFGS."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

F64 = torch.float64


class LogisticRegression:
    """A data set with a N(0, 1/δ) prior, in float64."""

    def __init__(self, generator: torch.Generator, n: int = 60, d: int = 3, prior_precision: float = 1.0) -> None:
        self.x = torch.randn(n, d, generator=generator, dtype=F64)
        self.x[:, -1] = 0.6 * self.x[:, 0] + 0.8 * self.x[:, -1]  # the posterior is not mean-field
        p = (self.x @ torch.tensor([2.0, -1.0, 0.5], dtype=F64)[:d]).sigmoid()
        self.y = torch.bernoulli(p, generator=generator)
        self.prior_precision = prior_precision
        nodes, weights = np.polynomial.hermite_e.hermegauss(40)
        self.nodes, self.weights = torch.tensor(nodes), torch.tensor(weights / weights.sum())

    def __len__(self) -> int:
        return len(self.x)

    def _logits(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Quadrature nodes of each example's logit, ``[n, nodes]``."""
        return (self.x @ mean)[:, None] + (self.x.square() @ variance).sqrt()[:, None] * self.nodes

    def expectations(self, mean: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E_q of the mean gradient, of the mean Hessian's diagonal and of the mean squared gradient."""
        p = self._logits(mean, 1 / precision).sigmoid()
        residual = p - self.y[:, None]
        grad = (self.x * (residual @ self.weights)[:, None]).mean(0)
        hessian = (self.x.square() * ((p * (1 - p)) @ self.weights)[:, None]).mean(0)
        squares = (self.x.square() * (residual.square() @ self.weights)[:, None]).mean(0)
        return grad, hessian, squares

    def negative_bound(self, mean: Tensor, log_std: Tensor, kl_weight: float = 1.0) -> Tensor:
        """E_q[Σ_i ℓ_i] + τ KL(q ‖ prior), in nats."""
        logits = self._logits(mean, (2 * log_std).exp())
        nll = ((F.softplus(logits) - self.y[:, None] * logits) @ self.weights).sum()
        ratio = self.prior_precision * (2 * log_std).exp()
        kl = 0.5 * (ratio + self.prior_precision * mean.square() - 1 - ratio.log()).sum()
        return nll + kl_weight * kl

    def optimum(self, kl_weight: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mean and precision that minimise `negative_bound`."""
        mean = torch.zeros(self.x.shape[1], dtype=F64, requires_grad=True)
        log_std = torch.full_like(mean, -1.0, requires_grad=True)
        search = torch.optim.LBFGS(
            [mean, log_std], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            search.zero_grad()
            loss = self.negative_bound(mean, log_std, kl_weight)
            loss.backward()
            return loss

        search.step(closure)
        return mean.detach(), (-2 * log_std).exp().detach()
