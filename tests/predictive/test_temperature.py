from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from lightning_bayes.errors import NonFiniteError, ShapeError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.predictive import fit_temperature


def overconfident(generator, samples=None, examples=400, factor=2.5):
    """Logits of several samples, `factor` times the logits that the targets were drawn from."""
    logits = 1.5 * torch.randn(examples, 4, generator=generator, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    if samples is None:
        return factor * logits, targets
    spread = torch.randn(samples, examples, 4, generator=generator, dtype=torch.float64)
    return factor * (logits + 0.5 * spread), targets


@pytest.mark.parametrize("samples", [None, 1, 8])
def test_the_temperature_matches_scipys_minimum(generator, samples):
    outputs, targets = overconfident(generator, samples)
    stacked = outputs if outputs.ndim == 3 else outputs.unsqueeze(0)

    def nll(temperature):
        return F.nll_loss(Categorical().combine(stacked / temperature), targets).item()

    expected = minimize_scalar(nll, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    found = fit_temperature(outputs, targets)
    assert found == pytest.approx(expected.x, rel=1e-4)
    assert nll(found) <= expected.fun + 1e-9


def test_the_derivative_vanishes_at_the_temperature_of_a_sampled_posterior(generator):
    outputs, targets = overconfident(generator, samples=5)
    log_temperature = torch.tensor(math.log(fit_temperature(outputs, targets)), dtype=torch.float64, requires_grad=True)
    F.nll_loss(Categorical().combine(outputs / log_temperature.exp()), targets).backward()
    assert abs(log_temperature.grad.item()) < 1e-5


def test_a_known_factor_is_recovered(generator):
    outputs, targets = overconfident(generator, examples=20_000, factor=2.5)
    # Of T = 1/w with w the weight of a logistic regression: the Fisher information of log T is w² mean_i Var(f_i).
    logits = outputs / 2.5
    probs = logits.softmax(-1)
    information = ((probs * logits**2).sum(-1) - (probs * logits).sum(-1) ** 2).sum().item()
    assert abs(math.log(fit_temperature(outputs, targets) / 2.5)) < 4 / math.sqrt(information)


def test_samples_are_scaled_before_averaging(generator):
    outputs, targets = overconfident(generator, samples=8, examples=2000)
    after = fit_temperature(Categorical().combine(outputs), targets)
    assert abs(fit_temperature(outputs, targets) - after) > 0.05


def test_shards_with_a_reduction_give_the_temperature_of_the_full_data(generator):
    outputs, targets = overconfident(generator, samples=3, examples=60)
    barrier, totals = threading.Barrier(2, timeout=60), [None, None]

    def temperature_of(rank, examples):  # two threads in place of two processes
        def reduce(total):
            totals[rank] = total
            barrier.wait()
            reduced = totals[0] + totals[1]
            barrier.wait()
            return reduced

        return fit_temperature(outputs[:, examples], targets[examples], reduce)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(temperature_of, (0, 1), (slice(0, 20), slice(20, 60))))
    assert found[0] == found[1] == pytest.approx(fit_temperature(outputs, targets), rel=1e-5)


@pytest.mark.parametrize(("right", "bound"), [(True, 0.05), (False, 20.0)])
def test_without_an_interior_minimum_the_temperature_is_a_bound(right, bound):
    logits = torch.eye(3)
    targets = torch.arange(3) if right else (torch.arange(3) + 1) % 3
    assert fit_temperature(logits, targets) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("minimum", [0.0501, 0.3, 1.0, 7.7, 19.9])
def test_the_search_finds_minima_anywhere_in_its_range(minimum):
    assert minimise_over_logarithm(lambda t: math.log(t / minimum) ** 2, 0.05, 20.0, 31, 1e-6) == pytest.approx(
        minimum, rel=1e-5
    )


def test_the_grid_finds_the_lower_of_two_valleys():
    def loss(t):
        x = math.log(t)
        return min((x + 2) ** 2 + 0.1, (x - 1.5) ** 2)

    assert minimise_over_logarithm(loss, 0.05, 20.0, 31, 1e-6) == pytest.approx(math.exp(1.5), rel=1e-5)


def test_invalid_input_is_refused():
    for outputs, targets in [
        (torch.zeros(4, 3), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long)),
    ]:
        with pytest.raises(ShapeError, match=r"targets \[batch\] of at least one example, got \["):
            fit_temperature(outputs, targets)
    for strange in (3, -1):
        with pytest.raises(ShapeError, match=r"indices from 0 to 2, but lie between .* (1|3)\. Leave out examples"):
            fit_temperature(torch.zeros(2, 3), torch.tensor([1, strange]))
    outputs = torch.zeros(2, 4, 3)
    outputs[1, 2, 0] = outputs[0, 2, 1] = torch.nan  # of one example
    with pytest.raises(NonFiniteError, match="1 of 4 examples have logits that are not finite"):
        fit_temperature(outputs, torch.zeros(4, dtype=torch.long))
