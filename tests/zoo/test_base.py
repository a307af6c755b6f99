from __future__ import annotations

import pickle

import pytest
import torch
from lightning.pytorch.cli import LightningCLI, ReduceLROnPlateau
from torch import nn

from lightning_bayes.errors import ShapeError
from lightning_bayes.zoo import MLP, BayesClassifier, BayesRegressor, DigitsDataModule, LeNet5
from lightning_bayes.zoo.tasks.base import split_batch


def test_the_default_optimizer_is_adam_with_its_usual_rate():
    for task in (BayesClassifier(MLP(2, 3), 3), BayesRegressor(MLP(2, 1))):
        optimizer = task.configure_optimizers()
        assert type(optimizer) is torch.optim.Adam
        assert optimizer.defaults["lr"] == 1e-3
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, task.model.parameters()))


def test_a_task_with_default_arguments_can_be_sent_to_another_process():
    task = BayesClassifier(MLP(2, 3), 3)
    inputs = torch.randn(4, 2)
    assert torch.equal(pickle.loads(pickle.dumps(task))(inputs), task(inputs))


def test_a_scheduler_is_built_on_the_optimizer():
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    (optimizer,), (scheduler,) = BayesRegressor(MLP(2, 1), torch.optim.SGD, halve).configure_optimizers()
    assert scheduler.optimizer is optimizer


def test_a_plateau_scheduler_keeps_its_monitor():
    task = BayesRegressor(MLP(2, 1), lr_scheduler=lambda opt: ReduceLROnPlateau(opt, monitor="val/loss"))
    assert task.configure_optimizers()["lr_scheduler"]["monitor"] == "val/loss"


def test_forward_drops_the_targets_of_a_whole_batch():
    inputs, targets = torch.randn(4, 2), torch.zeros(4)
    task = BayesRegressor(nn.Linear(2, 1))
    for batch in (inputs, (inputs, targets), [inputs, targets]):
        assert torch.equal(task(batch), task.model(inputs))


@pytest.mark.parametrize(
    ("batch", "what"),
    [(torch.zeros(2), "a Tensor"), ([1, 2, 3], "a list of length 3"), ({"x": 1}, "a dict")],
    ids=["tensor", "triple", "dict"],
)
def test_a_batch_that_is_not_a_pair_is_rejected(batch, what):
    with pytest.raises(
        ShapeError, match=rf"must be a pair \(inputs, targets\), but got {what}\. Return \(input, target\)"
    ):
        split_batch(batch)


def test_the_command_line_reaches_network_optimizer_and_data(monkeypatch):
    options = [
        "--model.model=lightning_bayes.zoo.LeNet5",
        "--model.model.image_size=8",
        "--model.num_classes=10",
        "--model.optimizer.lr=0.25",
        "--model.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR",
        "--model.lr_scheduler.gamma=0.5",
        "--data.batch_size=7",
    ]
    monkeypatch.setattr("sys.argv", ["prog", *options])
    cli = LightningCLI(
        BayesClassifier,
        DigitsDataModule,
        run=False,
        seed_everything_default=False,
        auto_configure_optimizers=False,
        save_config_callback=None,
        trainer_defaults={"accelerator": "cpu", "logger": False},
    )
    (optimizer,), (scheduler,) = cli.model.configure_optimizers()
    assert type(cli.model.model) is LeNet5
    assert (type(optimizer), optimizer.defaults["lr"], scheduler.gamma) == (torch.optim.Adam, 0.25, 0.5)
    assert cli.datamodule.batch_size == 7
