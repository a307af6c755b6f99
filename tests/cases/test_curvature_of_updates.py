"""Learned factors, NaN numbers, reloaded data, side effects of layers, and accumulation: what an update measures."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from tiny_training import Classifier, blobs, fit, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_bayes import VOGN, IVONCallback, VOGNCallback, measure
from lightning_bayes.errors import UnsupportedTrainingError

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.log_var = nn.Linear(3, 1), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.net(x)[:, 0]


FACTORS = {
    "factor of the mean": lambda m, x, y: (-m.log_var).exp() * F.mse_loss(m(x), y),
    "divisor of the mean": lambda m, x, y: F.mse_loss(m(x), y) / m.log_var.exp(),
    "factor of each loss": lambda m, x, y: ((-m.log_var).exp() * (m(x) - y).square()).mean(),
}


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
@pytest.mark.parametrize("name", FACTORS)
def test_a_learned_factor_is_that_of_a_loop_over_examples_or_refused_by_name(name):
    model, loss = Scaled(), FACTORS[name]
    grads = [torch.autograd.grad(loss(model, X[i : i + 1], Y[i : i + 1]), model.log_var)[0] for i in range(8)]
    refusal = ""
    try:
        found = measure(model, lambda: loss(model, X, Y), "squared_gradients").curvature["log_var"]
    except UnsupportedTrainingError as error:
        refusal = str(error)
    if refusal:
        assert "log_var is in a term of the loss" in refusal
        assert name != "factor of each loss"
    else:
        torch.testing.assert_close(found, torch.stack(grads).square().mean())


@pytest.mark.filterwarnings("ignore:Update 1 has a non-finite gradient")
@pytest.mark.parametrize("number", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_loss_times_a_number_that_is_not_finite_is_skipped(number):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = VOGN(model, base=torch.optim.Adam(model.parameters()), num_data=8, relative_noise=0.1)
    with optimizer.sampled_params():
        (number * F.cross_entropy(model(X), Y.long() % 2)).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.weight, before)


class Reloaded(Classifier):
    def train_dataloader(self):
        return DataLoader(Subset(blobs(), range(8 * 2**self.trainer.current_epoch)), 8)


def test_the_number_of_examples_follows_reloaded_data():
    callback = VOGNCallback()
    quiet_trainer(callback, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Reloaded())
    assert callback.optimizer.param_groups[0]["posterior"]["num_data"] == 32


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_power_iterations_of_a_layer_are_those_of_plain_lightning():
    vectors = []
    for ours in ([], [VOGNCallback()]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
        fit(Classifier(net=net), *ours, max_steps=1)
        vectors.append(net[0].weight_u)
    assert torch.equal(*vectors)


class TwoParts(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.body(batch[0]).tanh()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def test_weights_without_noise_have_the_same_curvature_under_accumulation():
    """Over more updates than one of ten: at precision 1e12 the noise of the head does not matter."""
    found = []
    for accumulated, size in ((1, 16), (2, 8)):
        callback = IVONCallback(lr=1e-12, bayesian="^head", betas=(0.9, 0.9), prior_precision=1.0, init_precision=1e12)
        module = TwoParts()
        fit(module, callback, data=loader(size), max_epochs=8, accumulate_grad_batches=accumulated)
        found.append(callback.optimizer.state[module.body.weight]["curvature"])
        assert callback.optimizer.num_updates == 24
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-9)
