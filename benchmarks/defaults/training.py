"""One run: an ordinary LightningModule with its own optimizer, and a callback with default arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.defaults.methods import ENSEMBLE, MEMBERS, PEER, TEMPERATURE, make_callback
from benchmarks.defaults.problems import Data, Problem
from benchmarks.defaults.users import UserModule, fit, outputs_of
from lightning_bayes import VariationalCallback
from lightning_bayes.callbacks.posthoc.base import PosthocCallback
from lightning_bayes.predictive import PosteriorSamples, Samples, fit_temperature, predictive_samples

EVAL_SAMPLES = 20
Configure = Callable[[nn.Module, int, int], Any]

# What a user's configure_optimizers returns, from the module, the number of epochs and the updates per epoch.
OPTIMIZERS: dict[str, Configure] = {
    "adam": lambda module, epochs, length: torch.optim.Adam(module.parameters(), lr=1e-3),
    "adamw-cosine": lambda module, epochs, length: _cosine(torch.optim.AdamW(module.parameters(), lr=2e-3), epochs),
    "sgd": lambda module, epochs, length: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
    "adamw-onecycle": lambda module, epochs, length: _one_cycle(
        torch.optim.AdamW(module.parameters(), lr=3e-3), epochs * length
    ),
}


def _one_cycle(optimizer: torch.optim.Optimizer, updates: int) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=updates)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _cosine(optimizer: torch.optim.Optimizer, epochs: int) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)}


class LearnedNoise(nn.Module):
    """Appends a learned log standard deviation to the mean, ``[batch, 1]`` to ``[batch, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, mean: Tensor) -> Tensor:
        """Mean and log standard deviation."""
        return torch.cat([mean, self.log_std.expand_as(mean)], 1)


def user_module(problem: Problem, data: Data, optimizer: str) -> UserModule:
    """A classifier, or a Gaussian regression with a learned noise, with new weights."""
    net = problem.network(data)
    configure = partial(OPTIMIZERS[optimizer], epochs=problem.epochs, length=-(-len(data.train_x) // problem.batch))
    if problem.is_regression:
        return UserModule(nn.Sequential(net, LearnedNoise()), configure, _gaussian_nll)
    return UserModule(net, configure)


def _gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of means and log standard deviations ``[batch, 2]``, up to a constant."""
    mean, log_std = outputs.unbind(1)
    return F.gaussian_nll_loss(mean, targets, (2 * log_std).exp())


class Outputs(NamedTuple):
    """Outputs under each weight sample, ``[S, N, …]``."""

    test: Tensor
    ood: Tensor | None  # of out-of-distribution images


def train_and_predict(problem: Problem, data: Data, optimizer: str, method: str, seed: int) -> tuple[Outputs, float]:
    """Train once and predict the test set."""
    start = time.perf_counter()
    if method == ENSEMBLE:
        members = [_fit(problem, data, optimizer, "user", seed + 1000 * member) for member in range(MEMBERS)]
        return _split(lambda x: torch.cat([member(x) for member in members]), data), time.perf_counter() - start
    outputs = _fit(problem, data, optimizer, method, seed)
    seconds = time.perf_counter() - start
    return _split(outputs, data), seconds


def _fit(problem: Problem, data: Data, optimizer: str, method: str, seed: int) -> Callable[[Tensor], Tensor]:
    """Train once and return the function that predicts."""
    seed_everything(seed, verbose=False)
    module = user_module(problem, data, optimizer)
    train_set: Dataset[Any] = TensorDataset(data.train_x, data.train_y)
    if method == PEER:
        return _fit_peer(module, train_set, problem)
    if method == TEMPERATURE:
        return _fit_temperature(module, data, problem, seed)
    callback = make_callback(method, seed)
    fit(module, train_set, problem.batch, problem.epochs, [callback])
    return lambda x: _outputs(module, callback, x)


def _fit_temperature(module: UserModule, data: Data, problem: Problem, seed: int) -> Callable[[Tensor], Tensor]:
    """Train without a callback on nine tenths of the data, and divide logits by a temperature fitted on the last tenth."""
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed))
    train, held_out = order.split([len(order) - len(order) // 10, len(order) // 10])  # type: ignore[no-untyped-call]
    fit(module, TensorDataset(data.train_x[train], data.train_y[train]), problem.batch, problem.epochs)
    temperature = fit_temperature(_outputs(module, None, data.train_x[held_out]), data.train_y[held_out])
    return lambda x: _outputs(module, None, x) / temperature


def _split(outputs: Callable[[Tensor], Tensor], data: Data) -> Outputs:
    return Outputs(outputs(data.test_x), None if data.ood_x is None else outputs(data.ood_x))


@torch.no_grad()
def _outputs(module: UserModule, callback: VariationalCallback | PosthocCallback | None, x: Tensor) -> Tensor:
    samples = _samples(callback)
    return outputs_of(module, x)[None] if samples is None else samples.outputs(module, lambda: outputs_of(module, x))


def _samples(callback: VariationalCallback | PosthocCallback | None) -> Samples | None:
    """The weight samples of a finished fit; None for a point estimate."""
    if isinstance(callback, PosthocCallback):
        assert callback.posterior is not None
        return predictive_samples(PosteriorSamples(callback.posterior, EVAL_SAMPLES), callback.linearized, "softmax")
    if callback is None or callback.optimizer is None or not callback.optimizer.noisy:
        return None
    return PosteriorSamples(callback.optimizer.posterior(), EVAL_SAMPLES)


def _fit_peer(module: UserModule, train_set: Dataset[Any], problem: Problem) -> Callable[[Tensor], Tensor]:
    """Train with the package ivon-opt as its documentation recommends: lr 0.1, all else at the defaults."""
    import ivon

    loader = DataLoader(train_set, batch_size=problem.batch, shuffle=True)
    optimizer = ivon.IVON(module.parameters(), lr=0.1, ess=len(train_set))  # type: ignore[arg-type]
    for _ in range(problem.epochs):
        for index, batch in enumerate(loader):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                module.training_step(batch, index).backward()
            optimizer.step()
    module.eval()

    @torch.no_grad()
    def outputs(x: Tensor) -> Tensor:
        samples = []
        for _ in range(EVAL_SAMPLES):
            with optimizer.sampled_params():
                samples.append(outputs_of(module, x))
        return torch.stack(samples)

    return outputs
