"""Counter-based noise: a function of its key, standard normal, and the same for any number of threads."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_bayes.optim import noise
from lightning_bayes.optim.noise import CounterNoise


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(noise, "PART_ELEMENTS", 64)
    monkeypatch.setattr(noise, "MANY_PARTS", 2)


def drawn(key, shapes=((5,), (300,), (7, 11), (2, 3))):
    tensors = [torch.full(shape, torch.nan) for shape in shapes]
    CounterNoise(*key).fill_(tensors)
    return tensors


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_equal_keys_draw_equal_noise_and_others_do_not():
    assert same(drawn((1, 2, 3)), drawn((1, 2, 3)))
    assert all(not torch.equal(a, b) for a, b in zip(drawn((1, 2, 3)), drawn((1, 2, 4)), strict=True))


def test_number_of_threads_changes_nothing():
    before, threads = drawn((0,)), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert same(drawn((0,)), before)
    finally:
        torch.set_num_threads(threads)


def test_second_call_draws_other_noise():
    source, first, second = CounterNoise(0), torch.empty(4), torch.empty(4)
    source.fill_([first])
    source.fill_([second])
    assert not torch.equal(first, second)


def test_parts_of_a_large_tensor_are_independent_standard_normals():
    """In standard errors: mean, variance, and the correlation of the same place in neighbouring parts."""
    draws = drawn((5,), [(64 * 500,)])[0].double().view(500, 64)
    n = draws.numel()
    assert abs(draws.mean()) * math.sqrt(n) < 4
    assert abs(draws.var() - 1) / math.sqrt(2 / n) < 4
    assert abs((draws[1:] * draws[:-1]).mean()) * math.sqrt(n) < 4


def test_other_memory_layouts_are_filled():
    transposed = torch.full((20, 10), torch.nan).t()
    CounterNoise(0).fill_([transposed])
    assert transposed.isfinite().all()
