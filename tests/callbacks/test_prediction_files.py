"""Prediction files hold names, targets, labels and rejections by row, the same in every format."""

from __future__ import annotations

import csv
import sys
from types import ModuleType

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_bayes.callbacks import PredictionWriter
from lightning_bayes.callbacks.evaluation.prediction_table import save
from lightning_bayes.errors import HyperparameterError

NAMES = ("cat", "dog")


class Files(Dataset):
    """Data with logits as inputs and file names."""

    file_names = [f"{number}.png" for number in range(5)]  # noqa: RUF012
    targets = (0, 1, 0, 1, 1)
    logits = torch.tensor([[2.0, 0.0], [0.1, 0.0], [0.0, 3.0], [0.0, 0.2], [0.0, 1.0]])

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.logits[index], self.targets[index]


class Echo(LightningModule):
    """A module that returns its input."""

    lightning_bayes_link = "softmax"
    class_names = NAMES

    def forward(self, batch):
        return batch[0]


def predict(folder, dataset=None, *writers, **options):
    writers = writers or (PredictionWriter(str(folder), **options),)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=list(writers))
    trainer.predict(Echo(), DataLoader(dataset or Files(), batch_size=2))


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_has_one_value_in_each_cell(tmp_path):
    predict(tmp_path, filename="p.csv", reject_below=0.7)
    found, probs = rows(tmp_path / "p.csv"), Files.logits.softmax(1)
    assert [row["file"] for row in found] == Files.file_names
    assert [int(row["target"]) for row in found] == list(Files.targets)
    assert [row["label"] for row in found] == ["cat", "cat", "dog", "dog", "dog"]
    assert [row["reject"] for row in found] == [str(bool(p < 0.7)) for p in probs.amax(1)]
    torch.testing.assert_close(torch.tensor([float(row["probs_dog"]) for row in found]), probs[:, 1])
    entropy = torch.distributions.Categorical(probs=probs).entropy()
    torch.testing.assert_close(torch.tensor([float(row["entropy"]) for row in found]), entropy)


def test_the_tensors_say_the_same(tmp_path):
    predict(tmp_path, reject_below=0.7)
    table = torch.load(tmp_path / "predictions.pt", weights_only=True)
    assert (table["file"], table["target"].tolist()) == (Files.file_names, list(Files.targets))
    assert (table["label"][2], table["reject"].tolist()) == ("dog", [False, True, False, True, False])
    assert table["probs"].shape == (5, 2)


def test_a_subset_keeps_its_names(tmp_path):
    predict(tmp_path, Subset(Files(), [4, 0]))
    table = torch.load(tmp_path / "predictions.pt", weights_only=True)
    assert (table["file"], table["target"].tolist()) == (["4.png", "0.png"], [1, 0])


def test_what_is_not_known_has_no_column(tmp_path):
    predict(tmp_path, TensorDataset(Files.logits))
    table = torch.load(tmp_path / "predictions.pt", weights_only=True)
    assert not {"file", "target", "reject"} & set(table)


def test_unlabelled_images_have_no_target(tmp_path):
    unlabelled = Files()
    unlabelled.targets = [-1] * 5
    predict(tmp_path, unlabelled)
    assert "target" not in torch.load(tmp_path / "predictions.pt", weights_only=True)


def test_a_writer_that_was_asked_for_takes_the_place_of_the_default_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    predict(tmp_path, None, PredictionWriter(), PredictionWriter(".", "p.csv"), PredictionWriter("there"))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["p.csv", "predictions.pt"]
    assert (tmp_path / "there" / "predictions.pt").is_file()


def test_parquet_needs_its_package_before_anything_is_predicted(monkeypatch):
    monkeypatch.setattr("lightning_bayes.callbacks.evaluation.prediction_table.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r'p\.parquet needs pyarrow.*"lightning-bayes\[parquet\]", or use \.csv'
    ):
        PredictionWriter(filename="p.parquet")


def test_parquet_gets_the_columns_of_the_csv_file(monkeypatch, tmp_path):
    pyarrow, parquet, seen = ModuleType("pyarrow"), ModuleType("pyarrow.parquet"), []
    pyarrow.table, pyarrow.parquet = dict, parquet
    parquet.write_table = lambda table, buffer: (seen.append(table), buffer.write(b"PAR1"))
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    save({"probs": torch.tensor([[0.5, 0.5]]), "file": ["a"]}, tmp_path / "p.parquet", NAMES)
    assert seen == [{"file": ["a"], "probs_cat": [0.5], "probs_dog": [0.5]}]
    assert (tmp_path / "p.parquet").read_bytes() == b"PAR1"


def test_real_parquet_comes_back(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow, the extra `parquet`, is not installed")
    predict(tmp_path, filename="p.parquet")
    assert parquet.read_table(tmp_path / "p.parquet").column("label").to_pylist() == ["cat", "cat", "dog", "dog", "dog"]


@pytest.mark.parametrize(
    ("options", "message"), [({"filename": "p.xlsx"}, r"not as \.xlsx"), ({"reject_below": 1.5}, "reject_below=1.5")]
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(HyperparameterError, match=message):
        PredictionWriter(**options)
