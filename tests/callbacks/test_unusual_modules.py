"""Unusual models, batches and steps under `VOGNCallback` equal a loop over examples, or are refused by name.

The first batch has no noise and sets the curvature, so after one update the curvature is the first measurement.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from tiny_training import Classifier, assert_close, assert_same_bits, fit, mlp, weights
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import BayesError

ENGINES = ("fused", "backpack")
BATCH = 6


def vectors(size=BATCH, features=4):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, features, generator=generator), torch.arange(size) % 3


def one_batch(x, y, **options):
    return DataLoader(TensorDataset(x, y), **{"batch_size": max(len(x), 1), **options})


def cross_entropy(module, example):
    """Loss of one example of a `Classifier`."""
    return F.cross_entropy(module(example[0][None]), example[1][None])


def curvature(callback):
    names = {param: name for name, param in callback.optimizer.model.named_parameters()}
    return {names[p]: state["curvature"] for p, state in callback.optimizer.state.items() if "curvature" in state}


def assert_right(module, x, y, engine="fused", loss=cross_entropy):
    """The first update's curvature is the mean of squares from a loop over the examples."""
    twin = copy.deepcopy(module)
    callback = VOGNCallback(engine=engine, num_data=100)
    fit(module, callback, data=one_batch(x, y), max_epochs=None, max_steps=1)
    _, square = one_example_at_a_time(twin, list(zip(x, y, strict=True)), loss)
    assert callback.optimizer.num_updates == 1
    found = curvature(callback)  # deterministic parameters, such as BatchNorm's, have none
    assert {name for name, value in module.named_parameters() if value.dim() > 1} <= set(found)
    assert relative_error(found, {name: square[name] for name in found}) < 1e-5


every_engine = pytest.mark.parametrize("engine", ENGINES)


def test_a_batch_without_examples_in_the_middle_leaves_the_mean_of_the_batches_before():
    x, y = vectors()
    batches = [(x[:3], y[:3]), (x[:0], y[:0])]
    data = DataLoader(batches, batch_size=None)
    module, twin, callback = Classifier(), Classifier(), VOGNCallback(num_data=100)
    with pytest.raises(BayesError, match=r"The batch holds no example.*return None from training_step"):
        fit(module, callback, data=data)
    fit(twin, VOGNCallback(num_data=100), data=one_batch(x, y, batch_size=3), max_epochs=None, max_steps=1)
    assert callback.optimizer.num_updates == 1
    assert_same_bits(weights(module), weights(twin))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)  # Adam would amplify the rounding error of a zero gradient


def compiled(how):
    module = Classifier(sgd)
    if how == "torch.compile(module)":
        return torch.compile(module, backend="aot_eager")
    if how == "torch.compile(net)":
        module.net = torch.compile(module.net, backend="aot_eager")
    elif how == "net.compile()":
        module.net.compile(backend="aot_eager")
    else:
        module.net[0].compile(backend="aot_eager")
    return module


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks
@every_engine
@pytest.mark.parametrize("how", ["torch.compile(module)", "torch.compile(net)", "net.compile()", "one layer"])
def test_a_compiled_module_trains_as_the_plain_one(how, engine):
    torch.compiler.reset()
    x, y = vectors()
    plain, module = Classifier(sgd), compiled(how)
    for fitted in (plain, module):
        told = {"link": "softmax", "loss_reduction": "mean"}  # unknown from a compiled loss
        callback = VOGNCallback(engine=engine, num_data=100, **told)
        fit(fitted, callback, data=one_batch(x, y, batch_size=3), max_epochs=2)
    found = {name.replace("_orig_mod.", ""): value for name, value in weights(module).items()}
    assert_close(found, weights(plain), rtol=1e-4, atol=1e-6)


class SecondForward(Classifier):
    """One more forward whose output is not used."""

    grad = True

    def training_step(self, batch, batch_idx):
        with torch.set_grad_enabled(self.grad):
            self(batch[0] + 1)
        return super().training_step(batch, batch_idx)


class WithoutGraph(SecondForward):
    grad = False


@every_engine
@pytest.mark.parametrize("kind", [SecondForward, WithoutGraph])
def test_a_forward_without_backward_beside_the_training_loss_does_not_count(kind, engine):
    assert_right(kind(), *vectors(), engine)


def test_a_loss_without_a_graph_is_refused_by_torch_and_changes_nothing():
    class Detached(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).detach()

    module, before = Detached(), weights(mlp())
    with pytest.raises(RuntimeError, match="does not require grad"):
        fit(module, VOGNCallback())
    assert_same_bits(weights(module.net), before)
