"""Modules that torch.jit has compiled: refused by name if they are to be trained."""

from __future__ import annotations

import pytest
import torch
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.optim.diagonal.vogn import VOGN

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")


def compiled(how):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    scripted = torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, torch.randn(2, 4).double())
    return nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 3)).double()


def square(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("engine", ["fused", "backpack"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_trainable_compiled_modules_are_refused(how, engine):
    model = compiled(how)
    with pytest.raises(UnsupportedLayerError, match=r"torch\.jit has compiled 1\.0, .*original modules"):
        VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    assert not any("forward" in vars(module) for module in (model[0], model[2]))


@pytest.mark.parametrize("how", ["script", "trace"])
def test_frozen_compiled_modules_are_passed(how, generator):
    model, x = compiled(how), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    for param in model[1].parameters():
        param.requires_grad = False
    grad, squares = one_example_at_a_time(model, list(x), lambda m, e: square(m, e[None]))
    measured = measure(model, lambda: square(model, x))
    assert relative_error(measured.grad, grad) < 1e-10
    assert relative_error(measured.curvature, squares) < 1e-10
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0)
    with optimizer.sampled_params():
        square(model, x).backward()
    optimizer.step()
