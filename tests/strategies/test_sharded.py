"""Parameters that are spread over processes are refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from tiny_training import Classifier, mlp

from lightning_bayes import IVON, VOGN, Vadam
from lightning_bayes.callbacks.checks import check_training
from lightning_bayes.errors import UnsupportedTrainingError


@pytest.mark.parametrize("strategy", [ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_shard_are_refused_by_their_names(strategy):
    trainer = SimpleNamespace(strategy=object.__new__(strategy))
    with pytest.raises(UnsupportedTrainingError, match=rf"^The strategy {strategy.__name__} splits .*strategy='ddp'"):
        check_training(trainer, Classifier())


@pytest.fixture
def process_group():
    """One process that forms a gloo group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [IVON, Vadam, VOGN])
def test_sharded_parameters_are_refused_by_every_optimizer(kind, process_group):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard came with torch 2.6")
    from torch.distributed.device_mesh import init_device_mesh

    net = mlp()
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(
        UnsupportedTrainingError, match=r"^These parameters are DTensors.*FSDP2.*0\.weight, 0\.bias.*ddp"
    ):
        kind(net, lr=0.01, num_data=48)
