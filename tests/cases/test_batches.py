"""``forward`` receives in prediction what plain Lightning passes: the batch; the inputs of a batch if it takes those."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from tiny_training import fit, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import BatchNormRecalibration, SWAGCallback, VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError

X, MASK = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.ones(12, 4)
CLASSES = torch.arange(12) % 2


class Row(NamedTuple):
    x: Tensor
    mask: Tensor
    y: Tensor


class Rows(Dataset):
    def __init__(self, row):
        self.row = row

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return self.row(X[i], MASK[i], CLASSES[i])


class Base(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class WholeBatch(Base):
    def forward(self, batch):
        x, mask, _ = batch
        return self.net(x * mask)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch[2])


class WholeDict(Base):
    def forward(self, batch):
        return self.net(batch["x"] * batch["mask"])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch["y"])


class Inputs(Base):
    def forward(self, x, mask):
        return self.net(x * mask)

    def training_step(self, batch, batch_idx):
        x, mask, y = batch.values() if isinstance(batch, dict) else batch
        return F.cross_entropy(self(x, mask), y)


class First(Base):
    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[2])


def as_dict(x, mask, y):
    return {"x": x, "mask": mask, "y": y}


def as_tuple(*row):
    return row


CASES = [
    (WholeBatch, as_tuple),
    (WholeBatch, Row),
    (WholeDict, as_dict),
    (Inputs, as_tuple),
    (Inputs, Row),
    (Inputs, as_dict),
    (First, as_tuple),
    (First, Row),
]


@pytest.mark.parametrize(("module_class", "row"), CASES)
@pytest.mark.parametrize("recalibrates", [False, True])
def test_predictions_are_those_of_the_network(module_class, row, recalibrates):
    module, data = module_class(), DataLoader(Rows(row), batch_size=6)
    others = [BatchNormRecalibration(batches=2, of="mean")] if recalibrates else []
    trainer = fit(module, VOGNCallback(relative_noise=1e-6), *others, data=data, max_epochs=1)
    found = torch.cat([batch["probs"] for batch in trainer.predict(module, data)])
    module.eval()
    if not recalibrates:
        torch.testing.assert_close(found, module.net(X).softmax(1), rtol=1e-3, atol=1e-4)
    assert found.shape == (12, 2)


@pytest.mark.parametrize(("module_class", "row"), CASES)
def test_swag_estimates_statistics_on_what_forward_takes(module_class, row):
    module, callback = module_class(), SWAGCallback(start=0.0)
    fit(module, callback, data=DataLoader(Rows(row), batch_size=6), max_epochs=2)
    assert callback.posterior is not None
    inputs = X if module_class is First else X * MASK
    torch.testing.assert_close(module.net[1].running_mean, module.net[0](inputs).mean(0), rtol=1e-4, atol=1e-5)


class Pairs(Base):
    """``forward`` takes the two inputs that a batch ``((x, mask), y)`` nests."""

    def forward(self, x, mask):
        return self.net(x * mask)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(*batch[0]), batch[1])


def test_swag_refuses_batches_of_unknown_form_at_the_start_where_it_needs_them():
    data = DataLoader(Rows(lambda x, mask, y: ((x, mask), y)), batch_size=6)
    with pytest.raises(UnsupportedTrainingError, match=r"calling Pairs\.forward on batches, but it does not take"):
        fit(Pairs(), SWAGCallback(start=0.0), data=data, max_epochs=50)
    module, callback = Pairs(), SWAGCallback(start=0.0)
    module.net = nn.Linear(4, 2)  # without BatchNorm
    fit(module, callback, data=data, max_epochs=2)
    assert callback.posterior is not None


def test_a_batch_that_forward_does_not_take_is_refused_with_the_next_step():
    module, data = First(), DataLoader(Rows(lambda x, mask, y: (y, x)), batch_size=6)
    trainer = quiet_trainer(VOGNCallback(), max_epochs=1)
    trainer.fit(module, DataLoader(Rows(as_tuple), batch_size=6))
    with pytest.raises(UnsupportedTrainingError, match=r"Define First\.predict_step"):
        trainer.predict(module, data)
