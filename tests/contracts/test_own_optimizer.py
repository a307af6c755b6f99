"""A user's diagonal optimizer: one file outside of the package, with a pure update, an optimizer and a callback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback, load_posterior
from lightning_bayes.callbacks import VariationalCallback
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.diagonal.state import MeanFieldState, average
from lightning_bayes.optim.hyperparameters import Hyperparameters
from lightning_bayes.optim.settings import POSITIVE_FRACTION, setting

# -- the user's file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerHyperparameters(Hyperparameters):
    """Adds the power of the preconditioner."""

    power: float = setting(POSITIVE_FRACTION, default=1.0, schedulable=True)


def update(state, grad, sq_grad, *, lr, betas, prior, damping=0.0, step=1, power=1.0):
    """VOGN with the preconditioner (s + δ̃ + γ)^p."""
    curvature = average(state.curvature, sq_grad, betas[1])
    momentum = average(state.momentum, torch.add(grad, state.mean, alpha=prior), betas[0])
    metric = (curvature + (prior + damping)) ** power
    return MeanFieldState(state.mean - lr * momentum / (1 - betas[0] ** step) / metric, curvature, momentum)


@final
class PowerVOGN(VariationalOptimizer):
    """The update as a `torch.optim.Optimizer`."""

    noisy = averages_curvature = True
    natural_update = staticmethod(update)
    hyperparameters = PowerHyperparameters


@final
class PowerVOGNCallback(VariationalCallback):
    """The optimizer in Lightning."""

    optimizer_class = PowerVOGN


# -- inherited features ---------------------------------------------------------------------------------------------------


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("nll", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit(callback, **options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Classifier()
    resume = options.pop("ckpt_path", None)
    trainer = Trainer(callbacks=[callback], accelerator="cpu", devices=1, log_every_n_steps=1, **quiet, **options)
    trainer.fit(module, data(), ckpt_path=resume)
    return module, trainer


def weights(module):
    return torch.cat([param.detach().flatten() for param in module.parameters()])


@pytest.mark.parametrize("arguments", [{}, {"lr": 0.1, "init_precision": 50.0}], ids=["default step", "natural step"])
def test_with_the_power_one_it_is_vogn(arguments):
    mine, _ = fit(PowerVOGNCallback(power=1.0, **arguments), max_epochs=2)
    theirs, _ = fit(VOGNCallback(**arguments), max_epochs=2)
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-6, atol=1e-7)


def test_one_step_of_the_shell_is_the_written_equation():
    """Without noise: one full batch of a linear model, one example at a time, in float64."""
    model = nn.Linear(2, 1, bias=False).double()
    start, x, y = model.weight.detach().clone(), torch.randn(5, 2).double(), torch.randn(5, 1).double()
    opt = PowerVOGN(model, lr=0.3, num_data=5, prior_precision=2.0, damping=0.1, power=0.5, betas=(0.0, 0.9))
    with opt.sampled_params():
        (0.5 * (model(x) - y).square()).mean().backward()
    opt.step()
    each = (x @ start.T - y) * x
    prior, curvature = 2.0 / 5, each.square().mean(0)
    step = 0.3 * (each.mean(0) + prior * start) / (curvature + prior + 0.1).sqrt()
    torch.testing.assert_close(model.weight.detach(), start - step)


def test_its_own_hyperparameter_is_checked_scheduled_and_kept():
    callback = PowerVOGNCallback(power=lambda step: 1.0 / (1 + step), lr=0.1)
    fit(callback, max_epochs=1)
    assert callback.optimizer.param_groups[0]["posterior"]["power"] == 0.25
    for build in (PowerVOGNCallback, lambda **own: PowerVOGN(nn.Linear(2, 1), num_data=5, **own)):
        with pytest.raises(HyperparameterError, match=r"power=2\.0 must be above 0 and at most 1"):
            build(power=2.0)
    with pytest.raises(TypeError, match="powr"):
        PowerVOGNCallback(powr=0.5)


def test_it_resumes_tests_and_leaves_a_posterior(tmp_path):
    module, trainer = fit(PowerVOGNCallback(power=0.5), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert load_posterior(tmp_path / "last.ckpt").mean.keys() == dict(module.named_parameters()).keys()
    whole, _ = fit(PowerVOGNCallback(power=0.5), max_epochs=2)
    resumed, trainer = fit(PowerVOGNCallback(power=0.5), max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(whole))
    (metrics,) = trainer.test(resumed, data(), verbose=False)
    assert 0 < metrics["nll"] < 3
