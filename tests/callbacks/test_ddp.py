"""strategy="ddp" on two gloo processes against runs in one process; each test chooses the batches of each rank."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import Callback, LightningModule
from tiny_training import (
    CLASSES,
    FEATURES,
    FEW,
    LEFT,
    MANY,
    RIGHT,
    WHOLE,
    assert_close,
    assert_same_bits,
    fixed_loader,
    quiet_trainer,
)
from torch import nn

from lightning_bayes import VOGNCallback

pytestmark = pytest.mark.ddp


class Net(LightningModule):
    def __init__(self, normalised=False, unused=False):
        super().__init__()
        middle = nn.BatchNorm1d(6) if normalised else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), middle, nn.Linear(6, CLASSES))
        self.unused = nn.Linear(2, 2) if unused else None
        self.val_losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.val_losses.append(F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class CountReductions(Callback):
    """Counts this package's collectives, and DDP's own reductions."""

    def __init__(self):
        self.sizes, self.by_ddp, self.own = [], 0, dist.all_reduce

    def on_train_start(self, trainer, pl_module):
        dist.all_reduce = lambda *args, **kwargs: (self.sizes.append(args[0].numel()), self.own(*args, **kwargs))[1]
        trainer.strategy.model.register_comm_hook(self, type(self).count)

    def count(self, bucket):
        self.by_ddp += 1
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.updates = trainer.global_step

    def on_validation_start(self, trainer, pl_module):
        dist.all_reduce = self.own  # scores of validation are no part of an update

    def on_train_epoch_end(self, trainer, pl_module):
        dist.all_reduce = self.own  # before Lightning reduces what was logged


def the_same_noise():
    """Every rank samples the weights of rank 0."""
    return patch("lightning_bayes.callbacks.fit.closure.noise_samples", lambda trainer, count: list(range(count)))


def train(
    batches, *others, net=None, mc_samples=1, same_noise=False, count=False, defaults=False, interval=1, **options
):
    """Fit with known noise: init_precision makes the first step noisy; β₂ = 0.9 lets s follow the measurements."""
    torch.manual_seed(0)
    module = Net(**(net or {}))
    arguments = {} if defaults else {"lr": 0.05, "betas": (0.9, 0.9), "init_precision": 60.0, "prior_precision": 2.0}
    shared = {"num_data": 48, "mc_samples": mc_samples, "eval_samples": 4, "curvature_interval": interval}
    callback = VOGNCallback(**shared, **arguments)
    counter = CountReductions()
    trainer = quiet_trainer(callback, *([counter] if count else []), *others, num_sanity_val_steps=0, **options)
    with the_same_noise() if same_noise else nullcontext():
        trainer.fit(module, fixed_loader(batches), fixed_loader(batches))
    states, base = callback.optimizer.state, callback.optimizer.base_step
    curvature = {f"{n}/s": states[p]["curvature"] for n, p in module.named_parameters() if p in states}
    momenta = {
        n: states[p].get("momentum", base.base.state[p].get("exp_avg") if base is not None else None)
        for n, p in module.named_parameters()
        if p in states
    }
    momentum = {f"{name}/m": value for name, value in momenta.items() if value is not None}
    result = {"state": {**module.state_dict(), **curvature, **momentum}, "updates": callback.optimizer.num_updates}
    result["losses"] = torch.stack(module.val_losses)
    if count:
        result["count"] = {"sizes": counter.sizes, "by_ddp": counter.by_ddp, "updates": counter.updates}
    return result


SCENARIOS = {  # batches by rank, and options that both the ranks and one process take
    "split": ([LEFT, RIGHT], {"same_noise": True}),
    "uneven": ([FEW, MANY], {"same_noise": True}),
    "samples": ([WHOLE, WHOLE], {}),
    "more samples": ([WHOLE, WHOLE], {"mc_samples": 2}),
    "accumulated": ([WHOLE, WHOLE], {"accumulate_grad_batches": 3}),
    "accumulated split": ([LEFT, RIGHT], {"same_noise": True, "accumulate_grad_batches": 4}),
    "clipped": ([WHOLE, WHOLE], {"gradient_clip_val": 0.05}),
    "defaults": ([LEFT, RIGHT], {"defaults": True}),
    "different": ([LEFT, RIGHT], {"count": True, "mc_samples": 2, "max_epochs": 1}),
    "counted accumulation": ([LEFT, RIGHT], {"count": True, "accumulate_grad_batches": 4, "max_epochs": 1}),
    "amortised": ([FEW * 3, MANY * 3], {"same_noise": True, "interval": 4, "count": True, "max_epochs": 1}),
    "normalised": ([LEFT, RIGHT], {"net": {"normalised": True}}),
    "unused": ([LEFT, RIGHT], {"net": {"unused": True}}),
}


def train_on_rank(rank):
    ddp = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    return {
        name: train(batches[rank], **{"max_epochs": 2, **ddp, **options})
        for name, (batches, options) in SCENARIOS.items()
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(train_on_rank, 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_are_identical_bit_for_bit(ranks, name):
    """Weights, curvature, momentum and BatchNorm's running statistics; on the ranks' own data and noise."""
    assert_same_bits(ranks[1][name]["state"], ranks[0][name]["state"])


def in_one_process(**options):
    return train(WHOLE, **{"max_epochs": 2, **options})["state"]


def assert_equal_to(found, expected):
    assert_close(found["state"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["split", "uneven"])
def test_equal_noise_and_a_split_batch_are_one_process(ranks, name):
    """4 + 4 examples, and 2 + 6 examples, weighted by their number."""
    assert_equal_to(ranks[0][name], in_one_process())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("samples", {"mc_samples": 2}),
        ("more samples", {"mc_samples": 4}),
        ("accumulated", {"mc_samples": 2, "accumulate_grad_batches": 3}),
        ("clipped", {"mc_samples": 2, "gradient_clip_val": 0.05}),
    ],
)
def test_different_noise_gives_the_average_of_the_ranks_estimates(ranks, name, options):
    """The same batch under K samples on each of two ranks is one process with 2K samples."""
    assert_equal_to(ranks[0][name], in_one_process(**options))


def test_accumulation_over_a_split_batch_is_one_process(ranks):
    assert_equal_to(ranks[0]["accumulated split"], in_one_process(accumulate_grad_batches=4))
    assert ranks[0]["accumulated split"]["updates"] == 2 * 2  # six batches: one update of four, one of two, twice


@pytest.mark.parametrize(("name", "updates"), [("different", 6), ("counted accumulation", 2)])
def test_one_all_reduce_per_update_and_none_of_ddps(ranks, name, updates):
    """Still one with two samples per batch or four micro-batches per update. It holds the loss, ĝ, ĥ and the weight."""
    weights = FEATURES * 6 + 6 + 6 * CLASSES + CLASSES
    for rank in ranks:
        count = rank[name]["count"]
        assert count["sizes"] == [1 + 2 * weights + 1] * updates
        assert (count["updates"], count["by_ddp"]) == (updates, 0)


def test_ranks_measure_in_the_same_updates_and_reduce_no_curvature_in_the_others(ranks):
    """2 + 6 examples, measured in the updates 1 to 10, 14 and 18, equal one process with 8."""
    weights = FEATURES * 6 + 6 + 6 * CLASSES + CLASSES
    measured, bare = 1 + 2 * weights + 1, 1 + weights + 1
    expected = [measured] * 10 + [bare] * 3 + [measured] + [bare] * 3 + [measured]
    assert [rank["amortised"]["count"]["sizes"] for rank in ranks] == [expected] * 2
    assert_equal_to(ranks[0]["amortised"], train(WHOLE * 3, max_epochs=1, interval=4)["state"])


def test_batchnorm_follows_the_data_of_both_ranks(ranks):
    """The running statistics are not a copy of one rank's."""
    state = ranks[0]["normalised"]["state"]
    alone = train(LEFT, net={"normalised": True}, max_epochs=2)["state"]
    assert float((state["net.1.running_mean"] - alone["net.1.running_mean"]).abs().max()) > 1e-3
    assert state["net.1.num_batches_tracked"] == 12


def test_validation_averages_over_the_same_samples_on_both_ranks(ranks):
    """Validating two halves of a batch gives the batch's loss in one process."""
    halves = (ranks[0]["split"]["losses"] + ranks[1]["split"]["losses"]) / 2
    torch.testing.assert_close(halves, train(WHOLE, max_epochs=2)["losses"], rtol=1e-4, atol=1e-5)


def test_an_unused_layer_neither_hangs_nor_moves_by_its_likelihood(ranks):
    """Its curvature is the decayed one of init_precision; only the prior acts on it."""
    found = ranks[0]["unused"]["state"]
    assert found["unused.weight"].isfinite().all()
    start = (60.0 - 2.0) / 48
    torch.testing.assert_close(found["unused.weight/s"], torch.full((2, 2), start * 0.9**12))
