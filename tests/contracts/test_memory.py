"""No optimizer keeps tensors from one update to the next, beyond its state."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import OPTIMIZERS, construct
from torch import nn

from lightning_bayes.curvature import Softmax
from lightning_bayes.curvature.workspace import MIN_REUSED_ELEMENTS, Workspace

SIDE = 160  # weights large enough for the workspace's store of results


@pytest.fixture
def _new_objects_only():
    """The collector sees only the objects of this test: fast, and other tests' tensors stay out of the count."""
    gc.freeze()
    yield
    gc.unfreeze()


def living_bytes():
    gc.collect()
    return sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) in {torch.Tensor, nn.Parameter})


@pytest.mark.usefixtures("_new_objects_only")
@pytest.mark.parametrize("fisher", ["data", "drawn"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_living_memory_is_the_same_after_more_updates(optimizer, fisher):
    torch.manual_seed(0)
    side = 8 if optimizer.joins_weights else SIDE
    model = nn.Sequential(nn.Linear(side, side), nn.Tanh(), nn.Linear(side, 3))
    assert optimizer.joins_weights or model[0].weight.numel() >= MIN_REUSED_ELEMENTS
    if fisher == "drawn":
        model.likelihood = Softmax()
    opt = construct(optimizer, model, lr=1e-4, num_data=100, damping=1e-2, init_precision=1e4)
    x, y = torch.randn(8, side), torch.arange(8) % 3
    living = []
    for update in range(13):
        with opt.sampled_params():
            F.cross_entropy(model(x), y).backward()
        opt.step()
        if update % 6 == 0:
            living.append(living_bytes())
    assert living[2] == living[1] > 0


def test_workspace_keeps_no_more_results_than_it_lent():
    workspace, like = Workspace(), torch.zeros(MIN_REUSED_ELEMENTS)
    lent = workspace.result(like.shape, like)
    workspace.give_back([lent, torch.zeros_like(like), torch.zeros_like(like)])
    again = [workspace.result(like.shape, like) for _ in range(3)]
    assert [tensor.data_ptr() == lent.data_ptr() for tensor in again] == [True, False, False]
