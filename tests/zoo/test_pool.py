"""The active-learning pool: labelling, prediction, checkpoints and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import DataError, HyperparameterError
from lightning_bayes.predictive import batch_bald, predict_loader
from lightning_bayes.zoo.data import PoolDataModule


class Rows(LightningDataModule):
    """Rows whose first input is their index, with three alternating classes."""

    def __init__(self, rows=12, targets=None):
        super().__init__()
        labels = torch.arange(rows) % 3 if targets is None else targets
        inputs = torch.stack([torch.arange(rows).float(), (torch.arange(rows) % 3).float()], 1)
        self.rows = TensorDataset(inputs, labels)

    def train_dataloader(self):
        return DataLoader(self.rows, 4)


class RowsWithValidation(Rows):
    def val_dataloader(self):
        return DataLoader(self.rows, 4)


def pool_of(initial, **options):
    pool = PoolDataModule(Rows(), initial, **options)
    pool.setup("fit")
    return pool


def rows_in(loader):
    return [int(row) for inputs, _ in loader for row in inputs[:, 0]]


def test_every_row_is_trained_on_or_predicted():
    pool = pool_of(4)
    for _ in range(3):
        assert sorted(rows_in(pool.train_dataloader()) + rows_in(pool.predict_dataloader())) == list(range(12))
        before = pool.unlabelled
        pool.label(torch.tensor([1, 0]))
        assert pool.labelled[-2:] == [before[1], before[0]]
    assert rows_in(pool.pool_dataloader()) == pool.unlabelled


def test_a_checkpoint_keeps_the_labelled_rows_and_the_draws():
    pool, other = pool_of(4, seed=3), PoolDataModule(Rows(), 2)
    pool.label(pool.draw(2))
    other.load_state_dict(pool.state_dict())
    other.setup("fit")
    assert other.labelled == pool.labelled
    assert torch.equal(other.draw(3), pool.draw(3))


def test_a_second_setup_keeps_the_labels():
    pool = pool_of([0, 1])
    pool.label([5])
    pool.setup("predict")
    assert len(pool.labelled) == 3


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 3)

    def forward(self, batch):
        return self.net(batch[0] if isinstance(batch, list) else batch)

    def training_step(self, batch, _):
        return F.cross_entropy(self(batch), batch[1])

    def validation_step(self, batch, _):
        self.log("loss", F.cross_entropy(self(batch), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def test_a_round_of_active_learning_through_the_trainer(quiet_trainer):
    """Fit, predict the pool under the posterior, label the batch, fit again with the larger N."""
    pool = PoolDataModule(RowsWithValidation(), [0, 1, 2])
    for count in (3, 5):
        callback, net = VOGNCallback(eval_samples=2), Net()
        quiet_trainer(max_epochs=2, callbacks=[callback]).fit(net, pool)
        posterior = callback.optimizer.posterior()
        assert posterior.num_data == count
        probs = predict_loader(net, posterior, pool.pool_dataloader(), samples=4)
        assert probs.shape == (4, 12 - count, 3)
        pool.label(batch_bald(probs, 2))


def test_a_source_without_validation_has_none():
    assert pool_of(2).val_dataloader() == []


def test_a_single_class_is_rejected():
    pool = pool_of([0, 3, 6])
    with pytest.raises(DataError, match=r"All 3 labelled rows are of class 0, .* Label more rows"):
        pool.train_dataloader()
    pool.label([0])
    assert len(pool.train_dataloader().dataset) == 4


def test_equal_regression_targets_are_allowed():
    pool = PoolDataModule(Rows(targets=torch.ones(12)), 4)
    pool.setup("fit")
    assert len(pool.train_dataloader().dataset) == 4


def test_an_empty_pool_is_rejected():
    pool = pool_of(12)
    for ask in (pool.pool_dataloader, lambda: pool.label([0])):
        with pytest.raises(DataError, match="pool is empty: all 12 rows are labelled"):
            ask()
    assert pool.draw(3).tolist() == []


@pytest.mark.parametrize("initial", [0, 13, [], [0, 0], [12], [-1]])
def test_invalid_initial_rows_are_rejected(initial):
    with pytest.raises(HyperparameterError, match="does not fit a training set of 12 rows"):
        pool_of(initial)


@pytest.mark.parametrize("positions", [[10], [-1], [2, 2]])
def test_invalid_positions_are_rejected(positions):
    with pytest.raises(HyperparameterError, match=r"Cannot label the positions .* of a pool of 10 rows\. Pass unique"):
        pool_of([0, 1]).label(positions)
    with pytest.raises(HyperparameterError, match="batch_size=0"):
        PoolDataModule(Rows(), batch_size=0)
