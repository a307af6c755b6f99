"""DDP's options for its own reduction, which no pass uses: as without them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from tiny_training import Classifier, assert_same_bits, loader, quiet_trainer, weights

from lightning_bayes import IVONCallback, VOGNCallback
from lightning_bayes.callbacks.fit.closure import without_reducer


@pytest.fixture(autouse=True)
def _one_group(monkeypatch):
    """Lightning leaves its process group and the variables of its environment."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fitted(callback, **options):
    module = Classifier()
    strategy = DDPStrategy(process_group_backend="gloo", **options)
    quiet_trainer(callback, strategy=strategy, max_epochs=2).fit(module, loader())
    return weights(module), callback.loss_likelihood.only.kind.name


@pytest.mark.parametrize("make", [VOGNCallback, IVONCallback])
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_they_change_neither_a_fit_nor_what_its_loss_tells(options, make):
    (found, kind), (expected, expected_kind) = fitted(make(), **options), fitted(make())
    assert_same_bits(found, expected)
    assert kind == expected_kind == "categorical"


def test_they_are_restored_after_an_error():
    model = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(model)
    model.find_unused_parameters, model.static_graph = True, False

    def fails():
        with without_reducer(model):
            assert not model.find_unused_parameters
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert (model.find_unused_parameters, model.static_graph) == (True, False)
