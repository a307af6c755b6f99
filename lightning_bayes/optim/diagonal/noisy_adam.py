"""Noisy Adam, Zhang et al. 2018, Algorithm 1, https://arxiv.org/abs/1712.02390.

In this package's parametrisation, with ĝ the gradient of the batch's mean loss at θ ~ N(μ, (τ/Ñ) / (s + δ̃)), δ̃ = τδ/Ñ:

    m ← β₁ m + (1-β₁)(ĝ + δ̃ θ)                     the prior's gradient at the sample
    s ← β₂ s + (1-β₂) ĥ                            prior not included, no bias correction
    μ ← μ - α m̂ / (s + δ̃ + γ)                      m̂ = m / (1-β₁ᵗ); no square root

Zhang et al. maximise log p and write f for s, λ for τ, η for 1/δ, γ_in for δ̃ and γ_ex for γ. Their γ_ex enters the
preconditioner only, so leave ``damping_in_noise=False``. They start from s₀ = 0, which is
``init_precision=prior_precision``. The prior's gradient δ̃ θ has the same mean as VOGN's, δ̃ μ, but higher variance. It
is added to the gradient of each pass, so gradient clipping includes it.

    `NoisyAdam`         ĥ = ĝ², as printed; the posterior's width depends on the batch size, see
                        `optim.diagonal.batch_square`
    `NoisyAdamFisher`   ĥ = mean_i diag J_iᵀ H_i J_i, the Fisher with labels from the model, exact for linear regression.
                        Released code of this family samples one label per example; this is the expectation.
"""

from __future__ import annotations

from typing import final

from lightning_bayes.optim.diagonal.batch_square import BatchSquare
from lightning_bayes.optim.diagonal.estimators import SecondOrder
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.vogn import update  # adds δ̃ μ; each pass adds δ̃ (θ - μ)
from lightning_bayes.optim.variational import VariationalOptimizer


@final
class NoisyAdam(VariationalOptimizer):
    """Noisy Adam as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer`.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = NoisyAdam(model, lr=0.1, num_data=100, damping=1e-3)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> sorted(opt.posterior().mean)
        ['bias', 'weight']
    """

    noisy = prior_at_sample = True
    family_type = DiagonalFamily
    estimator = BatchSquare()
    averages_curvature = amortises = True
    natural_update = staticmethod(update)


@final
class NoisyAdamFisher(VariationalOptimizer):
    """Noisy Adam with the Fisher's diagonal, as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer`.

    BackPACK computes the diagonal; the argument ``engine`` has no effect. Models with layers or losses that BackPACK does
    not support are refused before the first step.
    """

    noisy = prior_at_sample = True
    family_type = DiagonalFamily
    averages_curvature = amortises = True
    natural_update = staticmethod(update)
    estimator = SecondOrder("diag_ggn")
