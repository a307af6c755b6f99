from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.zoo import MLP, BayesRegressor


@pytest.fixture
def toy():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(30, 4, generator=generator), torch.randn(30, generator=generator)


def make(noise_std=1.0):
    torch.manual_seed(0)
    return BayesRegressor(MLP(4, 1), noise_std=noise_std)


def loader(*tensors, batch_size=7):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


@pytest.mark.parametrize("noise_std", [0.1, 1.0, 3.0])
def test_training_loss_is_the_mean_negative_log_density(toy, noise_std, quiet_trainer):
    task, (inputs, targets) = make(noise_std), toy
    expected = -Normal(task(inputs).squeeze(-1), noise_std).log_prob(targets).mean()
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(task, loader(inputs, targets, batch_size=30), loader(inputs, targets))
    torch.testing.assert_close(trainer.callback_metrics["train/loss"], expected.detach())


def test_metrics_equal_the_definitions_over_uneven_batches(toy, quiet_trainer):
    task, (inputs, targets) = make(0.5), toy
    mean = task(inputs).squeeze(-1).detach()
    nll = -Normal(mean, 0.5).log_prob(targets).mean().item()
    rmse = (mean - targets).square().mean().sqrt().item()
    (test,) = quiet_trainer().test(task, loader(inputs, targets), verbose=False)
    inside = ((mean - targets).abs() <= 0.5 * 1.6448536).float().mean().item()
    interval = {"test/reg/coverage": inside, "test/reg/width": 2 * 0.5 * 1.6448536}
    assert test == pytest.approx({"test/reg/NLL": nll, "test/reg/RMSE": rmse, **interval}, rel=1e-5)
    (val,) = quiet_trainer().validate(task, loader(inputs, targets), verbose=False)
    assert val == pytest.approx({"val/loss": nll, "val/reg/NLL": nll, "val/reg/RMSE": rmse}, rel=1e-5)


def test_evaluation_uses_a_replaced_forward(toy, quiet_trainer):
    task, (inputs, targets) = make(), toy
    task.forward = lambda x: targets[: len(x), None]  # as the evaluation callback does: the average over samples
    (results,) = quiet_trainer().test(task, loader(inputs, targets, batch_size=30), verbose=False)
    assert results["test/reg/RMSE"] == 0


def test_columns_and_vectors_mean_the_same(toy, quiet_trainer):
    inputs, targets = toy
    flat = BayesRegressor(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    column = BayesRegressor(flat.model[0])
    results = [
        quiet_trainer().test(task, loader(inputs, y), verbose=False)[0]["test/reg/NLL"]
        for task in (flat, column)
        for y in (targets, targets[:, None])
    ]
    assert results == pytest.approx([results[0]] * 4)


def test_learns_a_line(quiet_trainer):
    inputs = torch.linspace(-1, 1, 64)[:, None]
    targets = 2 * inputs - 1
    torch.manual_seed(0)
    task = BayesRegressor(MLP(1, 1, hidden=()), optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    batches = loader(inputs, targets, batch_size=64)
    quiet_trainer(max_epochs=30).fit(task, batches, batches)
    weight, bias = task.model.parameters()
    assert weight.item() == pytest.approx(2, abs=0.05)
    assert bias.item() == pytest.approx(-1, abs=0.05)


def test_keeps_double_precision(toy):
    task, (inputs, targets) = make().double(), (t.double() for t in toy)
    samples, exact = task._samples((inputs, targets))
    loss = task.noise.expected_nll(samples[0], exact)
    assert samples.dtype == exact.dtype == loss.dtype == torch.float64


def test_has_the_stated_link():
    assert BayesRegressor.lightning_bayes_link == "identity"


@pytest.mark.parametrize("noise_std", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_noise_standard_deviation_is_rejected(noise_std):
    with pytest.raises(HyperparameterError, match=f"noise_std={noise_std}, but a standard deviation must be positive"):
        make(noise_std)


def test_outputs_of_several_columns_are_rejected(toy):
    task = BayesRegressor(MLP(4, 2))
    with pytest.raises(ShapeError, match=r"output of MLP has shape \[30, 2\].*requires \[30\] or \[30, 1\]"):
        task.training_step(toy, 0)


def test_targets_that_would_broadcast_are_rejected(toy):
    with pytest.raises(ShapeError, match=r"The target has shape \[1, 30\].*requires \[30\] or \[30, 1\]"):
        make().training_step((toy[0], toy[1][None]), 0)


def test_the_nll_averages_densities_over_samples_per_example(monkeypatch):
    """Neither a Gaussian with matched moments nor the joint density of all examples."""
    task = BayesRegressor(nn.Linear(2, 1), noise_std=0.5)
    samples = torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]])
    monkeypatch.setattr(task, "sampled_forward", lambda inputs: samples)
    targets = torch.tensor([1.5, 2.5])
    task.test_step((torch.zeros(2, 2), targets), 0)
    densities = torch.distributions.Normal(samples[..., 0], 0.5).log_prob(targets).exp()
    torch.testing.assert_close(task.test_metrics["reg/NLL"].compute(), -densities.mean(0).log().mean())
    torch.testing.assert_close(task.test_metrics["reg/RMSE"].compute(), torch.tensor(0.5))


def test_the_likelihood_draws_labels_with_the_noise_of_the_loss():
    task = BayesRegressor(nn.Linear(1, 1), noise_std=0.5)
    draws = task.lightning_bayes_likelihood.sample(torch.zeros(10_000), torch.Generator().manual_seed(0))
    assert abs(draws.var() / 0.25 - 1) < 4 * (2 / 10_000) ** 0.5
    mean, targets = torch.zeros(3), torch.ones(3)
    torch.testing.assert_close(
        task.lightning_bayes_likelihood.loss(mean, targets), task.noise.expected_nll(mean, targets)
    )
