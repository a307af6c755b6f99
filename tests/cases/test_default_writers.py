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


def test_required_figures_of_no_classifier_name_the_shapes(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 2)), 4)
    with pytest.raises(UnsupportedTrainingError, match=r"outputs \(4, 2\) and targets \(4, 2\) of torch.float32"):
        quiet_trainer(EvaluationFigures(str(tmp_path))).test(Evaluated(2), data, verbose=False)


def test_a_classifier_has_figures(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), 4)
    quiet_trainer(EvaluationFigures(str(tmp_path), required=False)).test(Evaluated(2), data, verbose=False)
    assert {path.name for path in tmp_path.iterdir()} >= {"reliability.png", "risk_coverage.png"}
