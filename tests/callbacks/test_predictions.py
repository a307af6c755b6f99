from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from tiny_training import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback, mc_predict
from lightning_bayes.callbacks import PredictionWriter
from lightning_bayes.callbacks.predictions import filename, stack


class Plain(LightningModule):
    """Three logits of one number."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 3)

    def forward(self, batch):
        return self.net(batch[0] if isinstance(batch, list) else batch)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Stated(Plain):
    lightning_bayes_link = "softmax"


class Returning(Stated):
    """A module that overrides predict_step."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.make(batch)


def loader(count=7, **kwargs):
    return DataLoader(TensorDataset(torch.arange(count).float()[:, None], torch.arange(count) % 3), 3, **kwargs)


def written(folder, module, loaders, **kwargs):
    quiet_trainer(PredictionWriter(), default_root_dir=folder, **kwargs).predict(module, loaders)
    return torch.load(folder / "predictions.pt", weights_only=True)


def test_a_point_prediction_is_written_by_the_stated_link(tmp_path):
    module, inputs = Stated(), torch.arange(7.0)[:, None]
    table = written(tmp_path, module, loader())
    logits = module(inputs).detach()
    torch.testing.assert_close(table["probs"], logits.softmax(-1))
    torch.testing.assert_close(table["entropy"], torch.distributions.Categorical(logits=logits).entropy())
    torch.testing.assert_close(table["mutual_information"], torch.zeros(7))


def test_without_a_link_outputs_stay_as_they_are(tmp_path):
    module = Plain()
    table = written(tmp_path, module, loader())
    assert set(table) == {"outputs", "dataloader_idx", "index", "target"}
    torch.testing.assert_close(table["outputs"], module(torch.arange(7.0)[:, None]).detach())


def test_the_posterior_average_is_written(tmp_path):
    module, callback = Plain(), VOGNCallback(eval_samples=4)
    fitted = quiet_trainer(callback, PredictionWriter(str(tmp_path / "there")))
    fitted.fit(module, loader())
    fitted.predict(module, loader())
    table = torch.load(tmp_path / "there" / "predictions.pt", weights_only=True)
    expected = mc_predict(module, callback.optimizer.posterior(), torch.arange(7.0)[:, None], samples=4)
    for name in ("probs", "entropy", "mutual_information"):
        torch.testing.assert_close(table[name], getattr(expected, name))
    assert (table["mutual_information"] > 0).all()


@pytest.mark.filterwarnings(
    "ignore:.*sampler has shuffling enabled"
)  # shuffled on purpose, so that positions are out of order
def test_rows_say_which_example_of_which_loader_they_are(tmp_path):
    module = Returning(lambda batch: {"x": batch[0][:, 0], "note": "not a tensor", "batch_size": torch.tensor(3)})
    table = written(tmp_path, module, [loader(7), loader(4, shuffle=True)])
    assert set(table) == {"x", "batch_size", "dataloader_idx", "index", "target"}
    assert table["dataloader_idx"].tolist() == [0] * 7 + [1] * 4
    assert table["index"].tolist() == table["x"].tolist()
    assert sorted(table["index"][7:].tolist()) == [0, 1, 2, 3]
    assert table["batch_size"].tolist() == [3] * 11


def test_a_predict_step_of_the_users_own_is_not_passed_through_the_link(tmp_path):
    table = written(tmp_path, Returning(lambda batch: batch[1]), loader())
    assert table["outputs"].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda batch: None,
        lambda batch: [1, 2],
        lambda batch: {"a": "text"},
        lambda batch: {"a": torch.zeros(3), "b": torch.zeros(2)},
        lambda batch: torch.tensor(1.0),
        lambda batch: torch.zeros(len(batch[0]), len(batch[0])),
    ],
    ids=["none", "list", "no tensors", "two lengths", "scalar", "another width in the last batch"],
)
@pytest.mark.filterwarnings("ignore:predict returned None:UserWarning")  # Lightning's warning about the first of them
def test_what_is_no_table_is_not_written(make, tmp_path):
    with pytest.warns(UserWarning, match=r"Returning\.predict_step returned no table.*Return a tensor, or a dict"):
        quiet_trainer(PredictionWriter(), default_root_dir=tmp_path).predict(Returning(make), loader())
    assert not (tmp_path / "predictions.pt").exists()


def test_a_fast_run_writes_nothing(tmp_path):
    quiet_trainer(PredictionWriter(), default_root_dir=tmp_path, fast_dev_run=True).predict(Stated(), loader())
    assert not (tmp_path / "predictions.pt").exists()


def test_columns_must_be_those_of_the_first_batch():
    assert stack([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}]) is None
    assert stack([]) is None


def test_every_process_has_a_file():
    assert filename(SimpleNamespace(world_size=1, global_rank=0)) == "predictions.pt"
    assert filename(SimpleNamespace(world_size=4, global_rank=2)) == "predictions_rank2.pt"
