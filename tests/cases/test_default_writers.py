"""What the command line adds by default never ends a test or a prediction after its work."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from tiny_training import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_bayes.callbacks import EvaluationFigures, PredictionWriter
from lightning_bayes.errors import UnsupportedTrainingError


class Network(LightningModule):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.net = nn.Linear(4, outputs)

    def forward(self, x):
        return self.net(x)


class Rows(Dataset):
    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.zeros(4)


TARGETS = [
    (["cat", "dog", "cat", "cow"], ["cat", "dog", "cat", "cow"]),
    (torch.eye(4)[:, :3], torch.eye(4)[:, :3]),
    ([None] * 4, None),
    ([0.5, 1.5, 2.5, 3.5], torch.tensor([0.5, 1.5, 2.5, 3.5])),
    ([1, None, 2, 0], torch.tensor([1, -1, 2, 0])),
    ([1.5, None, 2.5, 0.5], torch.tensor([1.5, math.nan, 2.5, 0.5])),
    ([[1, 2], [3], [4, 5, 6], []], ["[1, 2]", "[3]", "[4, 5, 6]", "[]"]),
    ([True, False, True, True], torch.tensor([True, False, True, True])),
    ([{"boxes": 1}, {}, {}, {}], ["{'boxes': 1}", "{}", "{}", "{}"]),
]


@pytest.mark.parametrize(("targets", "expected"), TARGETS, ids=lambda value: str(value)[:20])
def test_targets_are_written_as_they_are(targets, expected, tmp_path):
    quiet_trainer(PredictionWriter(str(tmp_path))).predict(Network(), DataLoader(Rows(targets), 2))
    written = torch.load(tmp_path / "predictions.pt", weights_only=True).get("target")
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(written, expected, equal_nan=True)
    else:
        assert written == expected


class Evaluated(Network):
    def test_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("size", outputs.square().mean())
        return {"outputs": outputs, "targets": batch[1]}


class Tokens(Evaluated):
    def forward(self, x):
        return self.net(x[:, None].expand(-1, 3, -1))


STEPS = [
    (Evaluated(1), torch.randn(8, 1)),  # a regression
    (Evaluated(2), torch.randn(8, 2)),
    (Evaluated(3), torch.ones(8, 3).long()),  # multilabel
    (Tokens(3), torch.zeros(8, 3).long()),  # a class per token
    (Evaluated(1), torch.zeros(8).long()),  # one logit
]


@pytest.mark.parametrize(("module", "targets"), STEPS)
def test_a_test_of_no_classifier_is_left_alone(module, targets, tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 4), targets), 4)
    plain = quiet_trainer().test(module, data, verbose=False)
    figures = EvaluationFigures(str(tmp_path), required=False)
    assert quiet_trainer(figures).test(module, data, verbose=False) == plain
    assert list(tmp_path.iterdir()) == []


LABELS = {
    "ignored": lambda f, y: (f, torch.where(y > 0, y, -100)),
    "beyond the outputs": lambda f, y: (f, y + 5),
    "not finite": lambda f, y: (f * math.nan, y),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_test_whose_labels_cannot_be_drawn_is_left_alone(name, tmp_path):
    class Labelled(Network):
        def test_step(self, batch, batch_idx):
            outputs, targets = LABELS[name](self(batch[0]), batch[1])
            return {"outputs": outputs, "targets": targets}

    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), 4)
    quiet_trainer(EvaluationFigures(str(tmp_path), required=False)).test(Labelled(), data, verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_loaders_by_name_are_written_with_their_targets(tmp_path):
    loaders = {"one": DataLoader(Rows([1, 2, 3, 4]), 2), "other": DataLoader(Rows([5, 6, 7, 8]), 2)}
    quiet_trainer(PredictionWriter(str(tmp_path))).predict(Network(), loaders)
    assert torch.load(tmp_path / "predictions.pt", weights_only=True)["target"].tolist() == list(range(1, 9))


def test_columns_of_the_users_predict_step_are_kept(tmp_path):
    class Named(Network):
        def predict_step(self, batch, batch_idx):
            probs = self(batch).softmax(1)
            return {"probs": probs, "label": 7 + probs.argmax(1), "index": 100 + probs.argmax(1)}

    quiet_trainer(PredictionWriter(str(tmp_path))).predict(Named(), DataLoader(Rows([0] * 4), 2))
    written = torch.load(tmp_path / "predictions.pt", weights_only=True)
    assert (written["label"] >= 7).all()
    assert (written["index"] >= 100).all()


@pytest.mark.parametrize("names", [lambda self: ["cat", "dog"], 2, {0: "cat", 1: "dog"}, "ab", ["cat", "dog"]])
def test_class_names_are_a_list_or_the_users_own_business(names, tmp_path):
    class Named(Network):
        class_names = names

        def predict_step(self, batch, batch_idx):
            return {"probs": self(batch).softmax(1)}

    quiet_trainer(PredictionWriter(str(tmp_path))).predict(Named(), DataLoader(Rows([0] * 4), 2))
    labels = torch.load(tmp_path / "predictions.pt", weights_only=True)["label"]
    assert isinstance(labels, list) == isinstance(names, list)


def test_required_figures_of_no_classifier_name_the_shapes(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 2)), 4)
    with pytest.raises(UnsupportedTrainingError, match=r"outputs \(4, 2\) and targets \(4, 2\) of torch.float32"):
        quiet_trainer(EvaluationFigures(str(tmp_path))).test(Evaluated(2), data, verbose=False)


def test_a_classifier_has_figures(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), 4)
    quiet_trainer(EvaluationFigures(str(tmp_path), required=False)).test(Evaluated(2), data, verbose=False)
    assert {path.name for path in tmp_path.iterdir()} >= {"reliability.png", "risk_coverage.png"}
