"""A trust region round the natural step: the default where nobody chose a learning rate for VOGN.

**A heuristic**, measured on eleven small problems, not from a paper. A natural step has no fixed length, so a learning
rate tuned for Adam means nothing to it. This rule takes the natural direction and bounds its root mean square, tensor by
tensor, by the step that the user's own optimizer would take:

    s₁ = ĥ₁                                          first batch: no noise, no bias
    s ← s + max(1-β₂, 1/(t+1)) (ĥ - s)               running mean first, running average later
    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)
    d = a m̂ / (s + δ̃ + γ)                            a = 0.1
    μ ← μ - d · min(1, r / RMS(d))                   r = η                      Adam and its kin move by about η
                                                     r = η RMS(m̂) / (1-μ_sgd)   SGD with momentum μ_sgd
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.optim.state import MeanFieldState, average

NATURAL_RATE = 0.1  # a
RELATIVE_NOISE = 0.3  # κ: noise std stays below this share of each tensor's size, see posteriors.noise_floor

RadiusRule: TypeAlias = Literal["adam", "sgd"]


def update(
    state: MeanFieldState,
    grad: Tensor,
    sq_grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    prior: float,
    damping: float = 0.0,
    step: int = 1,
    radius: RadiusRule = "adam",
    momentum: float = 0.0,
) -> MeanFieldState:
    """One bounded update of one parameter; pure.

    Args:
        state: State before the update.
        grad: ĝ, mean gradient of the negative log-likelihood at the sample.
        sq_grad: ĥ, mean squared per-example gradient at the sample.
        lr: η, the learning rate of the user's optimizer.
        betas: (β₁, β₂).
        prior: δ̃.
        damping: γ.
        step: Number of this update, from 1.
        radius: Which optimizer's step bounds this one.
        momentum: Momentum of the user's SGD; ignored by ``"adam"``.

    Returns:
        State after the update.
    """
    weight_of_old = min(betas[1], step / (step + 1)) if step > 1 else 0.0
    curvature = average(state.curvature, sq_grad, weight_of_old)
    momentum_grad = average(state.momentum, torch.add(grad, state.mean, alpha=prior), betas[0])
    debias = 1 / (1 - betas[0] ** step)
    natural = momentum_grad.div(curvature + (prior + damping)).mul_(NATURAL_RATE * debias)
    bound = lr if radius == "adam" else lr / (1 - momentum) * debias * root_mean_square(momentum_grad)
    mean = torch.addcmul(state.mean, natural, shortening(natural, bound), value=-1)
    return MeanFieldState(mean, curvature, momentum_grad)


def root_mean_square(tensor: Tensor) -> Tensor:
    """Return √(mean of squares), a scalar."""
    length: Tensor = torch.linalg.vector_norm(tensor)
    mean_square_root: Tensor = length / tensor.numel() ** 0.5
    return mean_square_root


def shortening(step: Tensor, radius: Tensor | float) -> Tensor:
    """Return the factor, at most 1, that brings the root mean square of `step` within `radius`, a scalar."""
    length = root_mean_square(step).clamp_min(torch.finfo(step.dtype).tiny)
    return (radius / length).clamp_max(1.0)
