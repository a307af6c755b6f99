"""What users do under DDP: two gloo processes that share each batch train, validate and test as one process does.

The last batch gives one rank four rows and the other two. Plain DDP averages such ranks equally; ours count examples.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from distributed import run_on_ranks
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping
from tiny_training import (
    LEFT,
    RIGHT,
    WHOLE,
    assert_close,
    assert_same_bits,
    blobs,
    fixed_loader,
    quiet_trainer,
    weights,
)
from torch import nn

from lightning_bayes import BatchNormRecalibration, MultiModeCallback, SWAGCallback, VOGNCallback

pytestmark = pytest.mark.ddp

UNEVEN = [*WHOLE[:5], WHOLE[5][:6]]
HALVES = [rows[:4] for rows in UNEVEN], [rows[4:] for rows in UNEVEN]
EVEN = {"accumulated": (WHOLE, (LEFT, RIGHT))}  # micro-batches of unequal sizes add up as in plain Lightning


class Net(LightningModule):
    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 6), middle), nn.Linear(6, 3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.accuracy(outputs, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("loss", F.cross_entropy(outputs, batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


def without_noise(**options):
    return VOGNCallback(relative_noise=1e-30, num_data=46, **options)


SCENARIOS = {  # callbacks, and the trainer's options
    "defaults": (lambda: [without_noise()], {}),
    "accumulated": (lambda: [without_noise()], {"accumulate_grad_batches": 2}),
    "unfrozen": (lambda: [BackboneFinetuning(1), without_noise()], {}),
    "stopped": (lambda: [without_noise(), EarlyStopping("loss", patience=1)], {}),
    "calibrated": (lambda: [without_noise(calibrate=True)], {}),
    "several modes": (lambda: [without_noise(), MultiModeCallback(num_modes=2)], {}),
    "recalibrated": (lambda: [without_noise(), BatchNormRecalibration(batches=2)], {}),
}


def run(callbacks, options, batches, middle=nn.Tanh):
    module = Net(middle())
    trainer = quiet_trainer(*callbacks(), **{"max_epochs": 3, "num_sanity_val_steps": 0, **options})
    trainer.fit(module, fixed_loader(batches), fixed_loader(batches))
    tested = trainer.test(module, fixed_loader(batches), verbose=False)[0]
    return {"state": weights(module), "tested": {name: tested[name] for name in ("accuracy", "loss")}}


class Limited(nn.Linear):
    """Limits the norms of its rows in each forward, at weights that differ between the ranks."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


def run_on_rank(rank):
    ddp = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    halves = {name: EVEN.get(name, (UNEVEN, HALVES))[1][rank] for name in SCENARIOS}
    found = {name: run(new, ddp | options, halves[name]) for name, (new, options) in SCENARIOS.items()}
    swag = run(lambda: [SWAGCallback(start=0.0)], ddp, (LEFT, RIGHT)[rank], lambda: nn.BatchNorm1d(6))
    limited = run(lambda: [VOGNCallback(num_data=46)], ddp, HALVES[rank], lambda: Limited(6, 6))
    return {**found, "SWAG": swag, "limited": limited}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(run_on_rank, 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.filterwarnings("ignore:BatchNormRecalibration. no BatchNorm")
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_are_one(ranks, name):
    callbacks, options = SCENARIOS[name]
    alone = run(callbacks, options, EVEN.get(name, (UNEVEN, HALVES))[0])
    assert_same_bits(ranks[0][name]["state"], ranks[1][name]["state"])
    assert_close(ranks[0][name]["state"], alone["state"], rtol=1e-4, atol=1e-5)
    for rank in ranks:
        assert rank[name]["tested"] == pytest.approx(alone["tested"], rel=1e-4)


def test_weights_that_a_layer_changes_are_equal_on_all_ranks(ranks):
    assert_same_bits(ranks[0]["limited"]["state"], ranks[1]["limited"]["state"])


def test_swag_estimates_statistics_on_the_data_of_all_ranks(ranks):
    found, other = ranks[0]["SWAG"]["state"], ranks[1]["SWAG"]["state"]
    assert_same_bits(found, other)
    inputs = blobs().tensors[0] @ found["backbone.0.weight"].T + found["backbone.0.bias"]
    torch.testing.assert_close(found["backbone.1.running_mean"], inputs.mean(0), rtol=1e-4, atol=1e-5)
