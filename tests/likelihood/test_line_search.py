"""The search over a logarithm against minima that are known."""

from __future__ import annotations

import math

import pytest

from lightning_bayes.likelihood.line_search import minimise_over_logarithm


def search(loss, steps=12):
    return minimise_over_logarithm(loss, 0.1, 10.0, steps, 1e-8)


@pytest.mark.parametrize("best", [0.13, 1.0, 2.7, 9.5])
def test_a_minimum_inside_is_found(best):
    assert search(lambda x: math.log(x / best) ** 2) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("sign", "edge"), [(1, 0.1), (-1, 10.0)])
def test_a_monotone_loss_ends_at_the_edge_and_never_beyond(sign, edge):
    tried = []
    found = search(lambda x: tried.append(x) or sign * x)
    assert found == pytest.approx(edge)
    assert 0.1 * (1 - 1e-12) <= min(tried) <= max(tried) <= 10.0 * (1 + 1e-12)


def test_of_two_minima_the_lower_is_found():
    """Wells at 0.3 and 4, of depths 1 and 2."""

    def loss(x):
        return -math.exp(-20 * math.log(x / 0.3) ** 2) - 2 * math.exp(-20 * math.log(x / 4) ** 2)

    assert search(loss, steps=40) == pytest.approx(4, rel=1e-6)


def test_undefined_losses_are_avoided():
    assert search(lambda x: math.nan if x < 1 else math.log(x / 2) ** 2) == pytest.approx(2, rel=1e-6)
