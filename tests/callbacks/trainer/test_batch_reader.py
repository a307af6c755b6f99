"""Batches as the training step takes them, read after a fit without a trace in the user's module."""

from __future__ import annotations

import pytest
import tiny_training
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_bayes.callbacks.trainer.batch_reader import BatchReader
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import Categorical, Inputs, Likelihood, ScoredOutput, Targets

X = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 2, (8, 3), generator=torch.Generator().manual_seed(1))
LOADER = DataLoader(TensorDataset(X, Y), 8)
SELECTED = Likelihood((ScoredOutput(((),), Categorical(-1), Targets((1,), is_selected=True)),))


class Selecting(tiny_training.Classifier):
    """Scores the tokens whose first input is positive, and keeps much beside."""

    def __init__(self):
        net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
        super().__init__(lambda m: torch.optim.SGD(m.parameters(), 0.1), net, None)
        self.mean, self.seen, self.count = MeanMetric(), [], 0
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        f, chosen = self(x), x[..., 0] > 0
        loss = F.cross_entropy(f[chosen], y[chosen])
        self.mean.update(loss.detach())
        self.seen.append(float(loss.detach()))
        self.count += 1
        self.steps += 1
        self.log("loss", loss)
        return loss


def test_the_steps_own_targets_are_read_without_a_trace():
    module = Selecting()
    tiny_training.fit(module, data=LOADER)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    others, state = (float(module.mean.compute()), list(module.seen), module.count), torch.get_rng_state()
    (read,) = BatchReader(module, SELECTED)((X, Y))
    assert torch.equal(read.mask, X[..., 0] > 0)
    assert torch.equal(read.targets[read.mask], Y[read.mask])
    assert read.outputs.requires_grad
    assert (float(module.mean.compute()), module.seen, module.count) == others
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_a_batch_that_tells_its_targets_needs_no_step():
    module = Selecting()
    known = Likelihood((ScoredOutput(((),), Categorical(-1), Targets((1,), -100.0)),), Inputs((("path", (0,)),)))
    (read,) = BatchReader(module, known)((X, Y))
    assert read.mask is None
    assert torch.equal(read.targets, Y)
    assert not module.count


def test_a_step_that_updates_weights_is_not_run():
    module = Selecting()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedTrainingError, match="manual optimization"):
        BatchReader(module, SELECTED)((X, Y))
