"""Evaluation samples split over two ranks give the results of one process, with half of the passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from tiny_training import Classifier, loader, quiet_trainer
from torchmetrics.classification import MulticlassAccuracy

from lightning_bayes import BayesDDPStrategy, VOGNCallback

pytestmark = pytest.mark.ddp


class Measured(Classifier):
    """Counts its forward passes, and measures the samples' predictions on 48 examples in batches of 5, with 3 left over."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.passes = MulticlassAccuracy(3, average="micro"), 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x)

    def test_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("nll", F.cross_entropy(logits, batch[1]), sync_dist=True)


def evaluated(rank, world_size, mode):
    torch.manual_seed(0)
    results = {}
    for samples in (1, 5):
        module, callback = Measured(), VOGNCallback(lr=0.05, init_precision=60.0, eval_samples=samples)
        strategy = {"strategy": BayesDDPStrategy(mode), "devices": world_size} if mode else {}
        trainer = quiet_trainer(callback, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(module, loader(8))
        trainer = quiet_trainer(callback, max_epochs=1, **strategy)
        module.passes = 0
        (found,) = trainer.test(module, loader(5), verbose=False)
        probs = torch.cat([batch["probs"] for batch in trainer.predict(module, loader(5))])
        results[samples] = {**found, "passes": module.passes, "probs": probs}
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    one = run_on_ranks(evaluated, 1, tmp_path_factory.mktemp("one"), 1, None)[0]
    return one, run_on_ranks(evaluated, 2, tmp_path_factory.mktemp("two"), 2, "samples")


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_spread_samples_measure_what_one_process_does(found, rank, samples):
    one, two = found[0][samples], found[1][rank][samples]
    assert two["accuracy"] == one["accuracy"]
    assert two["nll"] == pytest.approx(one["nll"], rel=1e-6)
    assert two["test_diff/cls/NLL_SE"] == pytest.approx(one["test_diff/cls/NLL_SE"], rel=1e-4)  # the same examples
    assert torch.equal(two["probs"], one["probs"])


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_runs_its_share(found, rank):
    """Ten batches in the test, also at the mean, and ten in the prediction; three of five samples on each of two ranks."""
    assert found[0][5]["passes"] == 10 * (2 * 5 + 1) + 2  # and one each that shows the form of a batch
    assert found[1][rank][5]["passes"] == 10 * (2 * 3 + 1) + 2
