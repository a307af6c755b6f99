"""Inversions distributed over two gloo processes: fewer on each, results of one process, bitwise equal on both."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from torch import nn

from lightning_bayes.errors import NotPositiveDefiniteError
from lightning_bayes.optim import NoisyKFAC
from lightning_bayes.optim.kronecker.distributed_inversion import WorkerGroup, assign
from lightning_bayes.strategies import all_reduce_mean_, all_reduce_sum_

F64 = torch.float64
STEPS, PER_LAYER = 4, 4  # S and A, each for the inverse and for the root


def makespan(costs, owners, count):
    return max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == one) for one in range(count))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 3])
def test_the_longest_share_is_at_most_a_third_above_the_best(count, seed):
    """Graham's bound, against every assignment of seven tasks."""
    costs = (torch.rand(7, generator=torch.Generator().manual_seed(seed)) ** 3).tolist()
    best = min(makespan(costs, owners, count) for owners in product(range(count), repeat=7))
    assert makespan(costs, assign(costs, count), count) <= (4 / 3 - 1 / (3 * count)) * best + 1e-12


def deep_net():
    """The first layer costs more than the other three together."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()


def train(rank, world_size, shared, before_step=lambda model, opt: None):
    """Half of the same batch on each of two processes; also counts Cholesky factorisations."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=generator, dtype=F64), torch.randn(8, 2, generator=generator, dtype=F64)
    model, calls, factorise = deep_net(), [], torch.linalg.cholesky_ex
    opt = NoisyKFAC(
        model, lr=0.05, num_data=40, init_precision=50.0, damping=0.01, stats_interval=1, inverse_interval=1
    )
    opt.family.workers = WorkerGroup(rank, world_size, all_reduce_sum_) if shared else None
    share = slice(8 * rank // world_size, 8 * (rank + 1) // world_size)
    for _ in range(STEPS):
        with opt.sampled_params(0):
            F.mse_loss(model(x[share]), y[share]).backward()
        all_reduce_mean_(*opt.measured())
        before_step(model, opt)
        torch.linalg.cholesky_ex = lambda *a, **k: (calls.append(1), factorise(*a, **k))[1]
        try:
            opt.step()
        finally:
            torch.linalg.cholesky_ex = factorise
    states = {f"{i}/{k}": v for i, p in enumerate(model.parameters()) for k, v in opt.state[p].items()}
    return {**model.state_dict(), **{k: v for k, v in states.items() if isinstance(v, torch.Tensor)}}, len(calls)


def spoil_third_layer(model, opt):
    """With singular curvature, which only one of the two processes inverts."""
    factor = opt.state[model[2].weight].get("output_factor")
    if factor is not None:
        factor.fill_(0).fill_diagonal_(-1e6)


def refused(rank, world_size):
    try:
        train(rank, world_size, True, spoil_third_layer)
    except NotPositiveDefiniteError as error:
        return str(error)
    return "nothing"


def on_two_ranks(rank):
    return {"shared": train(rank, 2, True), "own": train(rank, 2, False), "refused": refused(rank, 2)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("shared"))


@pytest.mark.ddp
def test_each_rank_inverts_its_part(ranks):
    """One process inverts the first layer, the other the three small ones; without sharing both invert all four."""
    assert [rank["own"][1] for rank in ranks] == [4 * PER_LAYER * STEPS] * 2
    assert [rank["shared"][1] for rank in ranks] == [1 * PER_LAYER * STEPS, 3 * PER_LAYER * STEPS]


@pytest.mark.ddp
def test_two_ranks_equal_one_process(ranks):
    alone, count = train(0, 1, False)
    assert count == 4 * PER_LAYER * STEPS
    for rank in ranks:
        assert rank["shared"][0].keys() == alone.keys()
        for name, value in rank["shared"][0].items():
            torch.testing.assert_close(value, alone[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.ddp
def test_ranks_are_identical_bit_for_bit(ranks):
    """Including the memory layout, which affects the rounding of matrix products."""
    for name, value in ranks[0]["shared"][0].items():
        assert torch.equal(value, ranks[1]["shared"][0][name]), name
        assert value.stride() == ranks[1]["shared"][0][name].stride(), name


@pytest.mark.ddp
def test_a_layer_that_cannot_be_inverted_is_the_same_error_on_every_rank(ranks):
    assert "layer '2'" in ranks[0]["refused"]
    assert ranks[0]["refused"] == ranks[1]["refused"]
