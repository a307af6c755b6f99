"""A user's diagonal optimizer: one file outside of the package, with a pure update, an optimizer and a callback."""

from __future__ import annotations

from typing import Annotated, TypedDict, final

import pytest
import torch
from tiny_training import ValidatedClassifier, assert_close, assert_same_bits, loader, quiet_trainer, weights
from torch import nn

from lightning_bayes import VOGNCallback, load_posterior
from lightning_bayes.callbacks import VariationalCallback
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import Schedule, VariationalOptimizer
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.state import MeanFieldState, average
from lightning_bayes.optim.settings import POSITIVE_FRACTION, Setting

# -- the user's file ------------------------------------------------------------------------------------------------------


class PowerOwn(TypedDict, total=False):
    """Adds the power of the preconditioner."""

    power: Annotated[float | Schedule, Setting(POSITIVE_FRACTION, 1.0, schedulable=True)]


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
    family_type = DiagonalFamily
    natural_update = staticmethod(update)
    own_arguments = PowerOwn


@final
class PowerVOGNCallback(VariationalCallback):
    """The optimizer in Lightning."""

    optimizer_class = PowerVOGN


# -- inherited features ---------------------------------------------------------------------------------------------------


def test_an_argument_without_a_text_is_listed_with_its_range_and_default():
    assert "    power: (above 0 and at most 1; default 1.0).\n" in PowerVOGN.__doc__
    assert "    power: (above 0 and at most 1; default 1.0).\n" in PowerVOGNCallback.__doc__


def trained(callback, ckpt_path=None, **options):
    module, trainer = ValidatedClassifier(), quiet_trainer(callback, num_sanity_val_steps=0, **options)
    trainer.fit(module, loader(examples=24), loader(examples=24), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("arguments", [{}, {"lr": 0.1, "init_precision": 50.0}], ids=["default step", "natural step"])
def test_with_the_power_one_it_is_vogn(arguments):
    mine, _ = trained(PowerVOGNCallback(power=1.0, **arguments), max_epochs=2)
    theirs, _ = trained(VOGNCallback(**arguments), max_epochs=2)
    assert_close(weights(mine), weights(theirs), rtol=1e-6, atol=1e-7)


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
    trained(callback)
    assert callback.optimizer.param_groups[0]["posterior"]["power"] == 0.25
    for build in (PowerVOGNCallback, lambda **own: PowerVOGN(nn.Linear(2, 1), num_data=5, **own)):
        with pytest.raises(HyperparameterError, match=r"power=2\.0 must be above 0 and at most 1"):
            build(power=2.0)
    with pytest.raises(TypeError, match="powr"):
        PowerVOGNCallback(powr=0.5)


def test_it_resumes_validates_and_leaves_a_posterior(tmp_path):
    module, trainer = trained(PowerVOGNCallback(power=0.5))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert load_posterior(tmp_path / "last.ckpt").mean.keys() == dict(module.named_parameters()).keys()
    whole, _ = trained(PowerVOGNCallback(power=0.5), max_epochs=2)
    resumed, trainer = trained(PowerVOGNCallback(power=0.5), max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert_same_bits(weights(resumed), weights(whole))
    (metrics,) = trainer.validate(resumed, loader(examples=24), verbose=False)
    assert 0 < metrics["val_loss"] < 3
