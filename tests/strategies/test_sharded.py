"""Parameters that are sharded over processes are refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from tiny_training import Classifier, mlp

from lightning_bayes import CVI, IVON, KFAC, OGN, VOGN, VON, FullVON, NoisyKFAC, Vadam
from lightning_bayes.callbacks.checks import check_training
from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.posteriors import MeanField


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
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


@pytest.fixture
def sharded(process_group):
    """A model whose parameters FSDP2 holds."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard came with torch 2.6")
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp.fully_shard(mlp(), mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("kind", [VOGN, OGN, VON, CVI, KFAC, NoisyKFAC, FullVON])
def test_curvature_by_examples_or_layers_is_refused(kind, sharded):
    with pytest.raises(
        UnsupportedTrainingError, match=r"^These parameters are DTensors.*FSDP2.*0\.weight, 0\.bias.*IVON.*ddp"
    ):
        kind(sharded, lr=0.01, num_data=48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.01, "relative_noise": 0.1}, r"^relative_noise=0\.1 needs the size of whole tensors"),
        ({"step_rule": "trust_region", "lr": 0.01}, r"^The step 'trust_region' needs .*lr=\.\.\."),
    ],
)
def test_sizes_of_whole_tensors_are_refused(arguments, message, sharded):
    with pytest.raises(UnsupportedTrainingError, match=message):
        IVON(sharded, num_data=48, **arguments)


def test_hosts_have_nothing_to_average(sharded):
    with pytest.raises(UnsupportedTrainingError, match=r"^FSDP2 averages .* opt\.step\(\)"):
        IVON(sharded, lr=0.01, num_data=48).measured()


def test_the_default_step_is_refused(sharded):
    with pytest.raises(UnsupportedTrainingError, match=r"^The step 'user' needs"):
        Vadam(sharded, num_data=48, base=torch.optim.Adam(sharded.parameters()))


def test_a_model_that_is_sharded_in_part_is_refused(sharded):
    sharded.more = torch.nn.Linear(2, 2)
    with pytest.raises(
        UnsupportedTrainingError, match=r"not sharded over all 1 processes .*: more\.weight, more\.bias"
    ):
        IVON(sharded, lr=0.01, num_data=48)


def test_a_prior_of_whole_tensors_is_refused(sharded):
    prior = MeanField({"0.weight": torch.zeros(6, 4)}, {"0.weight": torch.ones(6, 4)}, {"0.weight": 1.0}, 48)
    with pytest.raises(PosteriorError, match=r"^prior= holds whole.*FSDP2 shards the parameters of FSDPSequential"):
        IVON(sharded, lr=0.01, num_data=48, prior=prior)
