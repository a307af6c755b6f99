"""The excess of the default over the optimum of its own objective, where closed forms have it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.defaults.objective import UNBOUNDED, excess, fit, tasks


@pytest.mark.parametrize("relative_noise", [0.3, UNBOUNDED])
def test_least_squares_with_the_exact_hessian_is_the_optimum_of_linear_regression(relative_noise):
    """No prior acts on the mean, and a Gaussian with the default's precision minimises the objective."""
    task = tasks()["linear"]
    model, opt = fit(task, "von", relative_noise, updates=2)
    best = torch.linalg.lstsq(task.inputs, task.targets).solution.T
    with torch.no_grad():
        model.weight.copy_(best)
    found = excess(task, model, opt)
    assert found.of_mean == pytest.approx(0, abs=1e-4)
    assert 0 <= found.total < 0.05  # the error of a finite number of draws

    away = torch.tensor([[0.1, -0.2, 0.3]])
    with torch.no_grad():
        model.weight.add_(away)
    loss = (task.inputs @ away.T).square().sum().item()  # the excess of the sum of squares
    assert excess(task, model, opt).of_mean == pytest.approx(loss, rel=1e-3)
