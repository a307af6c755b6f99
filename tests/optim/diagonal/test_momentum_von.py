"""Natural momentum against eqs. 82-83 by hand, the heavy ball, raw momentum and Adam's form."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.optim.diagonal import von
from lightning_bayes.optim.diagonal.momentum_von import MomentumVONState, update
from lightning_bayes.optim.diagonal.state import MeanFieldState

F64 = torch.float64


def start(mean=2.0, curvature=1.0, size=3):
    mean = torch.full((size,), mean, dtype=F64)
    return MomentumVONState(mean, torch.full_like(mean, curvature), torch.zeros_like(mean), torch.zeros_like(mean))


def measurements(generator, count, size=3):
    for _ in range(count):
        yield torch.randn(size, generator=generator, dtype=F64), 1 + torch.rand(size, generator=generator, dtype=F64)


def test_second_update_is_the_paper_line_by_line():
    """Eqs. 82-83 with numbers by hand: ᾱ = 0.2, γ̄ = 0.5, λ̃ = 0.1."""
    one = MomentumVONState(*(torch.tensor([v], dtype=F64) for v in (2.0, 1.0, 0.0, 1.7)))
    grad, hessian = torch.tensor([0.6], dtype=F64), torch.tensor([3.0], dtype=F64)
    new = update(one, grad, hessian, lr=0.2, betas=(0.5, 0.8), prior=0.1, step=2)
    s = 0.8 * 1 + 0.2 * 3
    expected = 2 - 0.2 * (0.6 + 0.1 * 2) / (s + 0.1) + 0.5 * (1 + 0.1) / (s + 0.1) * (2 - 1.7)
    assert new.curvature.item() == pytest.approx(s, rel=1e-14)
    assert new.mean.item() == pytest.approx(expected, rel=1e-14)
    assert new.previous_mean.item() == 2


def test_without_momentum_it_is_von(generator):
    """Algorithms E29, α = 0."""
    ours = start()
    theirs = MeanFieldState(*ours[:3])
    for t, (grad, hessian) in enumerate(measurements(generator, 30), start=1):
        ours = update(ours, grad, hessian, lr=0.1, betas=(0.0, 0.9), prior=0.1, step=t)
        theirs = von.update(theirs, grad, hessian, lr=0.1, betas=(0.0, 0.9), prior=0.1, step=t)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours.curvature, theirs.curvature, rtol=0, atol=0)


def test_with_constant_curvature_it_is_the_heavy_ball(generator):
    """Algorithms E29: torch's SGD with momentum at the rate α / (s + δ̃), on the gradient with the prior's."""
    found = start()
    weight = torch.full((3,), 2.0, dtype=F64, requires_grad=True)
    ball = torch.optim.SGD([weight], lr=0.1 / (1.0 + 0.25), momentum=0.7, weight_decay=0.25)
    for t, (grad, _) in enumerate(measurements(generator, 30), start=1):
        found = update(found, grad, torch.ones(3, dtype=F64), lr=0.1, betas=(0.7, 0.9), prior=0.25, step=t)
        weight.grad = grad
        ball.step()
        torch.testing.assert_close(found.mean, weight.detach(), rtol=1e-10, atol=1e-12)


def test_at_a_constant_rate_it_is_raw_momentum(generator):
    """M ← β₁ M + ĝ + δ̃μ, μ ← μ - α M / (s + δ̃), as Osawa et al. 2019 write it, while s changes."""
    found, mean, raw = start(), torch.full((3,), 2.0, dtype=F64), torch.zeros(3, dtype=F64)
    for t, (grad, hessian) in enumerate(measurements(generator, 30), start=1):
        found = update(found, grad, hessian, lr=0.1, betas=(0.7, 0.9), prior=0.25, damping=0.1, step=t)
        raw = 0.7 * raw + grad + 0.25 * mean
        mean = mean - 0.1 * raw / (found.curvature + 0.35)
        torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-12)


def test_with_adams_step_sizes_it_is_von_with_a_debiased_average(generator):
    """Eq. 66: ᾱ = α (1-β₁) / (1-β₁ᵗ), γ̄ = β₁ (1-β₁ᵗ⁻¹) / (1-β₁ᵗ)."""
    found, beta = start(), 0.7
    theirs = MeanFieldState(*found[:3])
    for t, (grad, hessian) in enumerate(measurements(generator, 30), start=1):
        lr, momentum = 0.1 * (1 - beta) / (1 - beta**t), beta * (1 - beta ** (t - 1)) / (1 - beta**t)
        found = update(found, grad, hessian, lr=lr, betas=(momentum, 0.9), prior=0.25, step=t)
        theirs = von.update(theirs, grad, hessian, lr=0.1, betas=(beta, 0.9), prior=0.25, step=t)
        torch.testing.assert_close(found.mean, theirs.mean, rtol=1e-10, atol=1e-12)
