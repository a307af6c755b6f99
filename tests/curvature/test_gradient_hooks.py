"""Hooks on parameters: those that look on are let in, those that change a gradient are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.diagonal.vogn import VOGN

every_engine = pytest.mark.parametrize("engine", ["fused", "backpack"])


def step(model, engine, generator):
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    with optimizer.sampled_params():
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
    optimizer.step()


@every_engine
def test_a_hook_that_looks_on_is_called_and_stays(engine, generator):
    model, seen = nn.Sequential(nn.Linear(4, 3)), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    model[0].weight.register_hook(lambda grad: grad.clamp(-1e9, 1e9))
    own = dict(model[0].weight._backward_hooks)
    step(model, engine, generator)
    assert seen == [(3, 4)]
    assert dict(model[0].weight._backward_hooks) == own


def halve(grad):
    return 0.5 * grad


@every_engine
@pytest.mark.parametrize("hook", [halve, lambda grad: grad.mul_(0.5)], ids=["returned", "in place"])
def test_a_hook_that_changes_the_gradient_is_refused_before_the_update(engine, hook, generator):
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight.register_hook(hook)
    before, own = model[0].weight.detach().clone(), dict(model[0].weight._backward_hooks)
    with pytest.raises(UnsupportedTrainingError, match=r"A hook on 0\.weight changes its gradient"):
        step(model, engine, generator)
    assert torch.equal(model[0].weight, before)
    assert dict(model[0].weight._backward_hooks) == own


def test_a_hook_may_remove_itself(generator):
    model = nn.Sequential(nn.Linear(4, 3))
    handle = model[0].weight.register_hook(lambda grad: handle.remove())
    step(model, "fused", generator)
    assert not model[0].weight._backward_hooks
