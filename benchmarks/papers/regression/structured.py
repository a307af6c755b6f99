"""Noisy K-FAC and block-tridiagonal Noisy K-FAC on the stacked matrices of all splits.

Noisy K-FAC is the package's optimizer: the networks of all splits are one model of grouped convolutions, in which every
split is a group and so has a separate posterior. `BlockTridiagonalKFAC` supports only a chain of linear layers, so its
method here calls the same pure functions on the stacked matrices.

The Fisher's factors are exact over labels; the papers draw one label per example. With a single output, E[δ₂²] = τ is known.
Factors start at the identity, as in the authors' code, so that the first noise has the standard deviation 1/√N. They are
averaged at every step and inverted every ``inverse_interval`` steps; with β̃ = 1e-3 they move by one per cent in between.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Generator, Tensor, nn

from benchmarks.papers.regression.data import Batch
from benchmarks.papers.regression.learner import Learner, Problem, predict_with
from benchmarks.papers.regression.network import Blocks, Trace, Weights, fisher_blocks, forward, mean_gradient
from lightning_bayes import NoisyKFAC
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, ChainState, damped_inverse, sample, update
from lightning_bayes.optim.kronecker.curvature import is_due

LAYERS = ("hidden", "output")


class StackedNetworks(nn.Module):
    """The networks of all R splits as one model: each is a group of two convolutions of length one."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        splits, hidden, inputs = weights.hidden.shape
        self.hidden = nn.Conv1d(splits * (inputs - 1), splits * hidden, 1, groups=splits)
        self.output = nn.Conv1d(splits * hidden, splits, 1, groups=splits)
        with torch.no_grad():
            for layer, matrix in zip((self.hidden, self.output), weights, strict=True):
                layer.weight.copy_(matrix[..., :-1].reshape(layer.weight.shape))
                layer.bias.copy_(matrix[..., -1].flatten())  # type: ignore[union-attr]

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs ``[B, R]`` for inputs ``[R, B, D + 1]``; the last column, of ones, is not used."""
        rows = inputs[..., :-1].transpose(0, 1).flatten(1)
        outputs: Tensor = self.output(self.hidden(rows[..., None]).relu())
        return outputs[..., 0]


@final
class StackedGaussian(OutputLikelihood):
    """N(f, 1/τ) for every split. A label one standard deviation from the output has δ² = E[δ²] = τ."""

    def __init__(self, precision: Tensor) -> None:
        self.precision = precision

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Labels ``[B, R]`` for which the Fisher's factors equal their expectation over labels."""
        return outputs.detach() + self.precision.rsqrt()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-density of each label but a constant."""
        return -0.5 * self.precision * (outputs - targets).square()


@final
class NoisyKFACLearner(Learner):
    """All splits with `NoisyKFAC`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.networks = StackedNetworks(problem.start())
        self.likelihood = StackedGaussian(problem.noise.precision())
        num_data, setting = problem.splits.num_data, problem.setting
        self.optimizer = NoisyKFAC(
            self.networks,
            betas=setting.betas,
            num_data=num_data,
            prior_precision=setting.prior_precision,
            prior_at="sample",
            init_precision=num_data * (1 + problem.prior**0.5) ** 2,  # precision of the damped identity
            stats_interval=1,
            inverse_interval=setting.inverse_interval,
            likelihood=self.likelihood,
            loss_reduction="mean",
            mc_samples=self.mc_samples,
            seed=int(torch.randint(2**31, (), generator=problem.generator)),
        )

    def step(self, batch: Batch, lr: float) -> None:
        """One update."""
        self.optimizer.param_groups[0]["lr"] = lr
        self.likelihood.precision = self.problem.noise.precision()
        residuals = []
        for _ in range(self.mc_samples):
            with torch.enable_grad(), self.optimizer.sampled_params():
                outputs, targets = self.networks(batch.inputs), batch.targets.T
                self.likelihood.loss(outputs, targets).backward()
            residuals.append((outputs.detach() - targets).T)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.problem.noise.observe(torch.stack(residuals))

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs under one weight sample."""
        with torch.no_grad(), self.optimizer.sampled_params():
            outputs: Tensor = self.networks(inputs)
        return outputs.T


def _first_blocks(weights: Weights) -> Blocks:
    """Identities, and zero between the layers."""
    hidden, output = (
        KroneckerProduct(*(torch.eye(side).expand(len(matrix), side, side) for side in matrix.shape[-2:]))
        for matrix in weights
    )
    sides = zip(hidden, output, strict=True)
    return Blocks(hidden, output, KroneckerProduct(*(torch.zeros_like(a[:, :, :1] @ b[:, :1]) for a, b in sides)))


def _noise(problem: Problem, means: tuple[Tensor, ...], *samples: int) -> list[Tensor]:
    return [problem.randn(*samples, *mean.shape) for mean in means]


def _measure(learner: Learner, weights: Weights, batch: Batch) -> tuple[Weights, Trace]:
    """The gradient averaged over weight samples, and the forward pass."""
    trace = forward(weights, batch.inputs)
    grads = mean_gradient(weights, trace, learner.output_gradients(trace, batch))
    return Weights(*(grad.mean(0) for grad in grads)), trace


@final
class BlockTridiagonalLearner(Learner):
    """All splits with block-tridiagonal Noisy K-FAC."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        weights = problem.start()
        curvature, momenta = _chain(_first_blocks(weights)), tuple(torch.zeros_like(mean) for mean in weights)
        self.state = ChainState(weights, momenta, curvature)
        self.inverse = damped_inverse(curvature, problem.prior, LAYERS)

    def step(self, batch: Batch, lr: float) -> None:
        """One update."""
        problem, weights = self.problem, self._draw(self.mc_samples)
        grads, trace = _measure(self, weights, batch)
        self.state = update(
            self.state,
            grads,
            _chain(fisher_blocks(weights, trace, problem.noise.precision())),
            lr=lr,
            betas=problem.setting.betas,
            prior=problem.prior,
            step=self.steps,
            invert=self._invert,
        )

    def _invert(self, curvature: ChainCurvature, damping: float) -> BlockTridiagonalInverse:
        """The inverse for step and noise, updated when due."""
        if is_due(self.steps, self.problem.setting.inverse_interval):
            self.inverse = damped_inverse(curvature, damping, LAYERS)
        return self.inverse

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs under one weight sample."""
        return predict_with(self._draw(), inputs)

    def _draw(self, *samples: int) -> Weights:
        noise = _noise(self.problem, self.state.means, *samples)
        return Weights(*sample(self.state.means, self.inverse, noise, num_data=self.problem.splits.num_data))


def _chain(blocks: Blocks) -> ChainCurvature:
    return ChainCurvature((blocks.hidden, blocks.output), (blocks.link,))
