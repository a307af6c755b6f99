"""The excess of the default over the optimum of its own objective, where closed forms have it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.defaults.objective import DRAWS, UNBOUNDED, draws, excess, fit, tasks


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
    assert found.total == pytest.approx(0, abs=0.05)  # the error of a finite number of draws

    away = torch.tensor([[0.1, -0.2, 0.3]])
    with torch.no_grad():
        model.weight.add_(away)
    loss = (task.inputs @ away.T).square().sum().item()  # the excess of the sum of squares
    assert excess(task, model, opt).of_mean == pytest.approx(loss, rel=1e-3)


def test_draws_are_independent_between_tensors_of_one_size():
    """Equal draws for a bias and the weights that read it once gave an MLP an excess of 100 nats."""
    noise = draws({"bias": torch.zeros(50), "weight": torch.zeros(1, 50)}, seed=0)
    products = noise["bias"] * noise["weight"][:, 0]
    assert abs(products.mean()) < 4 / (50 * DRAWS) ** 0.5
    assert noise["bias"].mean() == pytest.approx(0, abs=1e-12)
