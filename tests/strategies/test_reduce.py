"""One flat all-reduce on two gloo processes against means by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_on_ranks

from lightning_bayes.optim import VOGN
from lightning_bayes.strategies import all_reduce_mean_

pytestmark = pytest.mark.ddp


def tensors(rank):
    """Three shapes and, in the last, another layout: what it holds depends on the rank."""
    base = torch.arange(12.0).reshape(3, 4) + 100 * rank
    return [base.clone(), torch.tensor(1.0 + rank), base.clone().T, torch.zeros(0)]


def reduce_everything(rank):
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), all_reduce(*args, **kwargs))[1]
    found = {}
    for name, weight in {"equal": 5.0, "uneven": 1.0 + 2 * rank, "one alone": float(rank)}.items():
        found[name] = tensors(rank)
        all_reduce_mean_(found[name], weight)
    exact = [torch.full((2,), 1 / 3 + rank, dtype=torch.float64), torch.ones(1)]
    all_reduce_mean_(exact, 1.0)
    broken = [torch.tensor([1.0, float("nan") if rank else 2.0])]
    all_reduce_mean_(broken, 1.0)
    all_reduce_mean_([], 1.0)
    return {"means": found, "exact": exact, "broken": broken, "calls": calls}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(reduce_everything, 2, tmp_path_factory.mktemp("reduce"))


@pytest.mark.parametrize(("name", "share"), [("equal", 0.5), ("uneven", 0.75), ("one alone", 1.0)])
def test_every_rank_gets_the_mean_weighted_by_examples(ranks, name, share):
    """Weights 5 and 5, 1 and 3, 0 and 1: the second rank's share is ½, ¾, 1."""
    for rank in ranks:
        for found, first, second in zip(rank["means"][name], tensors(0), tensors(1), strict=True):
            torch.testing.assert_close(found, (1 - share) * first + share * second)


def test_one_collective_per_call_whatever_the_number_of_tensors(ranks):
    """Each carries the tensors' elements and the weight; no tensors, no collective."""
    assert [rank["calls"] for rank in ranks] == [[26, 26, 26, 4, 3]] * 2


def test_double_precision_is_kept_and_dtypes_stay(ranks):
    for rank in ranks:
        torch.testing.assert_close(
            rank["exact"][0], torch.full((2,), 1 / 3 + 0.5, dtype=torch.float64), rtol=1e-15, atol=0
        )
        assert rank["exact"][1].dtype == torch.float32


def test_what_is_not_finite_on_one_rank_is_so_on_all(ranks):
    """All ranks must skip the same update."""
    assert all(rank["broken"][0].isnan().tolist() == [False, True] for rank in ranks)


def test_a_single_process_is_left_alone():
    one = tensors(0)
    all_reduce_mean_(one, 3.0)
    for found, expected in zip(one, tensors(0), strict=True):
        assert torch.equal(found, expected)


def fail(rank):
    raise ValueError(f"rank {rank} is broken")


def test_run_on_ranks_shows_the_traceback_of_a_rank_that_fails(tmp_path):
    with pytest.raises(Exception, match=r"(?s)Process 0 terminated.*in fail.*ValueError: rank 0 is broken"):
        run_on_ranks(fail, 1, tmp_path)


def gradient_of_a_sum(rank):
    """The gradient of a summed loss that a step would take, and that of the rank's rows alone."""
    model, rows = torch.nn.Linear(3, 1).double(), 5 - 2 * rank
    with torch.no_grad():
        model.weight.fill_(0.5)
    x = torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3) + rank
    (alone,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
    opt = VOGN(model, base=torch.optim.SGD(model.parameters(), lr=1e-3), num_data=8, relative_noise=1e-12)
    with opt.sampled_params(rank):
        torch.nn.functional.mse_loss(model(x), torch.zeros(rows, 1, dtype=torch.float64), reduction="sum").backward()
    tensors, examples = opt.collect()
    all_reduce_mean_(tensors, examples)
    return {"alone": alone, "found": model.weight.grad, "examples": tensors[-1]}


def test_gradients_of_summed_losses_are_averaged_as_in_plain_training(tmp_path):
    """Processes with five and with three examples count alike, as in DDP."""
    first, second = run_on_ranks(gradient_of_a_sum, 2, tmp_path)
    for rank in (first, second):
        torch.testing.assert_close(rank["found"], (first["alone"] + second["alone"]) / 2, rtol=1e-9, atol=1e-9)
        assert float(rank["examples"]) == 4
