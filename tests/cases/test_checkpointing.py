"""A segment under activation checkpointing runs twice in each update, measured or not, as in plain Lightning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, NoisyKFACCallback, VOGNCallback
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Replacing(nn.Module):
    """Replaces its running mean in each call, instead of changing it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean.detach()


class Checkpointed(Classifier):
    reentrant = False

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Replacing(), nn.ReLU(), nn.Linear(6, 3)))

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.reentrant)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0].requires_grad_()), batch[1])


class Reentrant(Checkpointed):
    reentrant = True


class WithLosses(Checkpointed):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return {"loss": losses.mean(), "per_example_loss": losses}


CASES = [
    (Checkpointed, VOGNCallback),
    (Checkpointed, lambda: VOGNCallback(engine="backpack")),
    (Checkpointed, NoisyKFACCallback),
    (Checkpointed, lambda: VOGNCallback(bayesian=".*")),
    (Reentrant, VOGNCallback),
    (WithLosses, VOGNCallback),
]


@pytest.mark.parametrize(("module_class", "callback"), CASES)
def test_statistics_follow_the_data_as_in_plain_lightning(module_class, callback):
    def fitted(*callbacks, epochs=1):
        module = module_class()
        loader = DataLoader(TensorDataset(X, Y), 48)
        quiet_trainer(*callbacks, max_epochs=epochs).fit(module, loader)
        return {name: buffer for name, buffer in module.named_buffers() if "net" in name}

    torch.testing.assert_close(fitted(callback()), fitted())  # the first pass of a fit has no noise
    assert fitted(callback(), epochs=12)["net.1.num_batches_tracked"] == 24  # of which two or more measure


class Positions(Classifier):
    """Tokens and their positions below a checkpoint."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
        self.tokens, self.positions, self.head = nn.Embedding(9, 6), nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        below = self.tokens(x) + self.positions(torch.arange(5))
        return self.head(checkpoint(self.net, below, use_reentrant=True).mean(1))


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback, lambda: LaplaceCallback(subset="all")])
def test_a_reentrant_checkpoint_that_hides_the_examples_is_named(callback):
    tokens = torch.randint(9, (48, 5), generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        (ExampleDimensionError, UnsupportedTrainingError), match=r"reentrant.*use_reentrant=False to torch"
    ):
        quiet_trainer(callback()).fit(Positions(), DataLoader(TensorDataset(tokens, Y), 8))
