"""CVI against the equations of Khan et al. 2017, in their own variables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes.optim import CVI
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.von import update

F64 = torch.float64


def test_is_the_paper_in_its_own_variables(generator):
    """Eqs. 7-8, for the sum over N = 20 examples: σ⁻² ← (1-β)σ⁻² + β(E[h] + λ), μ ← μ - βσ²(E[g] + λμ)."""
    n, delta, beta = 20, 3.0, 0.3
    found = MeanFieldState(torch.ones(2, dtype=F64), torch.full((2,), 0.5, dtype=F64), torch.zeros(2, dtype=F64))
    mean, precision = torch.ones(2, dtype=F64), n * torch.full((2,), 0.5, dtype=F64) + delta
    for _ in range(20):
        grad, hessian = torch.randn(2, generator=generator, dtype=F64), torch.rand(2, generator=generator, dtype=F64)
        found = update(found, grad, hessian, lr=beta, betas=(0.0, 1 - beta), prior=delta / n)
        precision = (1 - beta) * precision + beta * (n * hessian + delta)
        mean = mean - beta / precision * (n * grad + delta * mean)
        torch.testing.assert_close(found.mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(n * found.curvature + delta, precision, rtol=1e-12, atol=0)


def test_a_step_takes_ten_samples_and_no_momentum():
    model, x, y = nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
    opt = CVI(model, num_data=4, init_precision=10.0)
    seen = []

    def closure():
        opt.zero_grad()
        seen.append(model.weight.detach().clone())
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    opt.step(closure)
    assert len(torch.cat(seen).unique(dim=0)) == 10
    assert opt.param_groups[0]["posterior"]["betas"][0] == 0
