"""No optimizer keeps tensors between updates, except for its state."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import OPTIMIZERS, construct, train_on
from torch import nn

from lightning_bayes.likelihood import Categorical
from lightning_bayes.optim import VOGN

SIDE = 160


@pytest.fixture
def _new_objects_only():
    """Restrict the garbage collector to objects of this test: it is fast and does not count other tests' tensors."""
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
    if fisher == "drawn":
        model.lightning_bayes_likelihood = Categorical()
    opt = construct(optimizer, model, lr=1e-4, num_data=100, damping=1e-2, init_precision=1e4)
    x, y = torch.randn(8, side), torch.arange(8) % 3
    living = []
    for update in range(13):
        train_on(opt, lambda: F.cross_entropy(model(x), y))
        if update % 6 == 0:
            living.append(living_bytes())
    assert living[2] == living[1] > 0


@pytest.fixture
def unreachable_tensors():
    """Count objects that only the garbage collector can free; it keeps them until the count is requested."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def count():
        gc.collect()
        return sum(type(found) in {torch.Tensor, nn.Parameter} for found in gc.garbage)

    yield count
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


class Scaled(nn.Module):
    """A layer and a parameter outside of layers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.linear(x) * self.scale


def train(optimizer, model):
    opt = construct(optimizer, model, lr=1e-4, num_data=100, damping=1e-2, init_precision=1e4)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    train_on(opt, lambda: F.cross_entropy(model(x), y), 2)


@pytest.mark.usefixtures("_new_objects_only")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_an_update_leaves_no_tensor_to_the_garbage_collector(optimizer, unreachable_tensors):
    """A pass's squares in a cycle of references stay in memory for many updates."""
    torch.manual_seed(0)
    train(optimizer, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert unreachable_tensors() == 0


@pytest.mark.usefixtures("_new_objects_only")
def test_parameters_beside_layers_leave_no_tensor_to_the_garbage_collector(unreachable_tensors):
    torch.manual_seed(0)
    train(VOGN, Scaled())
    assert unreachable_tensors() == 0


class Shifted(nn.Module):
    """Adds 1, so autograd needs no input; refers weakly to what it gets."""

    def forward(self, x):
        self.seen = weakref.ref(x)
        return x + 1


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), Scaled(), nn.LayerNorm(4)], ids=lambda layer: type(layer).__name__)
def test_a_measured_pass_keeps_no_output_that_autograd_does_not_need(layer):
    shifted, width = Shifted(), layer(torch.zeros(1, 4)).shape[1]
    opt = VOGN(nn.Sequential(layer, shifted, nn.Linear(width, 4)), lr=1e-3, num_data=100)
    with opt.sampled_params():
        loss = F.cross_entropy(opt.model(torch.randn(8, 4)), torch.arange(8) % 4)
        assert shifted.seen() is None
        loss.backward()
    opt.step()


@pytest.mark.parametrize("interval", [1, 4])
def test_the_workspace_is_freed_before_an_update_that_does_not_measure(interval):
    """The model uses the memory until the next measurement."""
    torch.manual_seed(0)
    model = nn.Linear(SIDE, SIDE)
    opt = VOGN(model, base=torch.optim.Adam(model.parameters()), num_data=100, curvature_interval=interval)
    x, y = torch.randn(8, SIDE), torch.randint(SIDE, (8,))
    workspace = opt.engine.workspace
    for _ in range(10):  # the tenth always measures; the eleventh does under T = 1
        with opt.sampled_params():
            F.cross_entropy(model(x), y).backward()
        stored = weakref.ref(workspace.empty("test", (SIDE,), model.weight).untyped_storage())
        opt.step()
    assert (stored() is None) == (interval > 1)
