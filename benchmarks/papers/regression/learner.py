"""The base of all methods: training, and scores of the Monte-Carlo predictive in the units of the data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Generator, Tensor
from torch.distributions import StudentT

from benchmarks.papers.regression.data import Batch, Setting, Splits, epoch_of
from benchmarks.papers.regression.network import Trace, Weights, forward, initial_weights
from lightning_bayes.zoo.tasks.noise import PUBLISHED_PRIOR, gamma_posterior


@final
class GammaPrecision:
    """q(τ) of Zhang et al. 2018 for every split; see `lightning_bayes.zoo.tasks.noise`."""

    def __init__(self, num_data: int, mean_square: Tensor) -> None:
        self.num_data, self.mean_square = num_data, mean_square

    def posterior(self) -> tuple[float, Tensor]:
        """Shape α and rates β ``[R]``."""
        shape, rate = gamma_posterior(torch.tensor(float(self.num_data)), self.mean_square, PUBLISHED_PRIOR)
        return float(shape), rate

    def precision(self) -> Tensor:
        """E[τ], ``[R]``."""
        shape, rate = self.posterior()
        return shape / rate

    def observe(self, residuals: Tensor) -> None:
        """Move r² towards that of a batch's residuals ``[..., R, B]``, with the batch's fraction of the data as weight."""
        batch = residuals.square().mean(-1)
        batch = batch.flatten(0, -2).mean(0) if batch.dim() > 1 else batch
        self.mean_square = self.mean_square.lerp(batch, min(1.0, residuals.shape[-1] / self.num_data))

    def log_density(self, residuals: Tensor) -> Tensor:
        """Log-density of residuals ``[..., R, m]``."""
        shape, rate = self.posterior()
        scale = (rate.double() / shape).sqrt()[:, None]
        return StudentT(2 * shape, 0.0, scale, validate_args=False).log_prob(residuals.double()).to(residuals)


@final
class FixedPrecision:
    """A known noise precision of every split, ``[R]``."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def precision(self) -> Tensor:
        """τ, ``[R]``."""
        return self.value

    def observe(self, residuals: Tensor) -> None:
        """Learn nothing."""

    def log_density(self, residuals: Tensor) -> Tensor:
        """Log-density of residuals ``[..., R, m]``."""
        tau = self.value[:, None]
        return 0.5 * (tau.log() - math.log(2 * math.pi) - tau * residuals.square())


@dataclass
class Problem:
    """Data, hyperparameters, randomness and noise precision of a learner."""

    splits: Splits
    setting: Setting
    generator: Generator
    noise: GammaPrecision | FixedPrecision

    @classmethod
    def of(cls, splits: Splits, setting: Setting, seed: int) -> Problem:
        """With a Gamma posterior of the noise precision, initialised with the variance of the targets."""
        noise = GammaPrecision(splits.num_data, torch.ones(len(splits.target_std)))
        return cls(splits, setting, torch.Generator().manual_seed(seed), noise)

    @property
    def prior(self) -> float:
        """δ̃ = δ/N."""
        return self.setting.prior_precision / self.splits.num_data

    def start(self) -> Weights:
        """Random initial weights of all splits."""
        splits, _, num_inputs = self.splits.train.inputs.shape
        return initial_weights(splits, num_inputs, self.setting.num_hidden, self.generator)

    def randn(self, *shape: int) -> Tensor:
        """Standard normal noise."""
        return torch.randn(shape, generator=self.generator)


class Learner(ABC):
    """The models of all splits, trained with one method."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.steps = 0
        self.mc_samples = problem.setting.samples_for(problem.splits.num_data)

    @abstractmethod
    def step(self, batch: Batch, lr: float) -> None:
        """One update with the current learning rate."""

    @abstractmethod
    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs ``[R, m]`` for inputs ``[R, m, D + 1]`` under one weight sample."""

    def output_gradients(self, trace: Trace, batch: Batch) -> Tensor:
        """δ₂ = τ (f - y) per example; the residuals also update the noise precision."""
        residuals = trace.outputs - batch.targets
        gradients = self.problem.noise.precision()[:, None] * residuals
        self.problem.noise.observe(residuals)
        return gradients

    def train(self) -> None:
        """Train for all epochs."""
        setting, train = self.problem.setting, self.problem.splits.train
        size = setting.batch_for(self.problem.splits.num_data)
        for epoch in range(setting.epochs):
            decay = 0.1 if setting.decays and epoch >= setting.epochs / 2 else 1.0
            for batch in epoch_of(train, size, self.problem.generator):
                self.steps += 1
                self.step(batch, setting.lr * decay)


class Scores(NamedTuple):
    """Scores of every split, ``[R]``, in the units of the data."""

    rmse: Tensor
    log_likelihood: Tensor


def evaluate(learner: Learner) -> Scores:
    """Score a trained learner on the test rows, with the mixture over its weight samples."""
    problem = learner.problem
    test, unit, count = problem.splits.test, problem.splits.target_std[:, None], problem.setting.eval_samples
    mean = torch.zeros_like(test.targets)
    density = torch.full_like(mean, -math.inf)
    for _ in range(count):  # one sample at a time: naval has a million activations per sample
        residuals = learner.predict(test.inputs) - test.targets
        mean += residuals / count
        density = torch.logaddexp(density, problem.noise.log_density(residuals))
    rmse = (mean * unit).square().mean(1).sqrt()
    return Scores(rmse, (density - math.log(count) - unit.log()).mean(1))


def predict_with(weights: Weights, inputs: Tensor) -> Tensor:
    """Outputs ``[R, m]``."""
    return forward(weights, inputs).outputs
