"""Noisy K-FAC and its block-tridiagonal form: the package's pure functions on the matrices of every split.

The Fisher's factors are exact over labels, where the papers draw one label for each example: with a single output
E[δ₂²] = τ is known. Factors start at the identity, as in the authors' code, so that the first noise has the standard
deviation 1/√N. They are averaged at every step, and inverted every ``inverse_interval`` steps; with β̃ = 1e-3 they move by
one per cent in between.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from benchmarks.papers.uci.data import Batch
from benchmarks.papers.uci.learner import Learner, Problem, predict_with
from benchmarks.papers.uci.network import Blocks, Trace, Weights, fisher_blocks, forward, mean_gradient
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.dense import block_tridiagonal
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature
from lightning_bayes.optim.kronecker import noisy_kfac
from lightning_bayes.optim.kronecker.intervals import is_due

LAYERS = ("hidden", "output")


def _first_blocks(weights: Weights) -> Blocks:
    """Identities, and nothing between the layers."""
    hidden, output = (
        KroneckerProduct(*(torch.eye(side).expand(len(matrix), side, side) for side in matrix.shape[-2:]))
        for matrix in weights
    )
    sides = zip(hidden, output, strict=True)
    return Blocks(hidden, output, KroneckerProduct(*(torch.zeros_like(a[:, :, :1] @ b[:, :1]) for a, b in sides)))


def _noise(problem: Problem, means: tuple[Tensor, ...], *samples: int) -> list[Tensor]:
    return [problem.randn(*samples, *mean.shape) for mean in means]


def _measure(learner: Learner, weights: Weights, batch: Batch) -> tuple[Weights, Trace]:
    """The gradient averaged over samples."""
    trace = forward(weights, batch.inputs)
    grads = mean_gradient(weights, trace, learner.output_gradients(trace, batch))
    return Weights(*(grad.mean(0) for grad in grads)), trace


@final
class NoisyKFACLearner(Learner):
    """All splits under Noisy K-FAC."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        weights = problem.start()
        blocks = _first_blocks(weights)
        self.states = [
            noisy_kfac.initial_state(mean, block, prior=problem.prior, name=name)
            for mean, block, name in zip(weights, blocks[:2], LAYERS, strict=True)
        ]

    def step(self, batch: Batch, lr: float) -> None:
        """One update."""
        problem, (_, beta2) = self.problem, self.problem.setting.betas
        weights = self._draw(self.mc_samples)
        grads, trace = _measure(self, weights, batch)
        blocks = fisher_blocks(weights, trace, problem.noise.precision())[:2]
        self.states = [
            noisy_kfac.average_factors(state, beta=beta2, output_factor=block.left, input_factor=block.right)
            for state, block in zip(self.states, blocks, strict=True)
        ]
        if is_due(self.steps, problem.setting.inverse_interval):
            self.states = [
                noisy_kfac.refresh(state, prior=problem.prior, name=name)
                for state, name in zip(self.states, LAYERS, strict=True)
            ]
        beta1 = problem.setting.betas[0]
        self.states = noisy_kfac.update(self.states, grads, lr=lr, beta=beta1, prior=problem.prior, step=self.steps)

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs under one draw."""
        return predict_with(self._draw(), inputs)

    def _draw(self, *samples: int) -> Weights:
        noise = _noise(self.problem, tuple(state.layer.mean for state in self.states), *samples)
        num_data = self.problem.splits.num_data
        return Weights(*(noisy_kfac.sample(s, e, num_data=num_data) for s, e in zip(self.states, noise, strict=True)))


@final
class BlockTridiagonalLearner(Learner):
    """All splits under block-tridiagonal Noisy K-FAC."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        weights = problem.start()
        curvature = _chain(_first_blocks(weights))
        self.state = block_tridiagonal.initial_state(weights, curvature, prior=problem.prior, names=LAYERS)

    def step(self, batch: Batch, lr: float) -> None:
        """One update."""
        problem, (beta1, beta2) = self.problem, self.problem.setting.betas
        weights = self._draw(self.mc_samples)
        grads, trace = _measure(self, weights, batch)
        measured = _chain(fisher_blocks(weights, trace, problem.noise.precision()))
        self.state = block_tridiagonal.average_curvature(self.state, measured, beta=beta2)
        if is_due(self.steps, problem.setting.inverse_interval):
            self.state = block_tridiagonal.refresh(self.state, prior=problem.prior, names=LAYERS)
        self.state = block_tridiagonal.update(
            self.state, grads, lr=lr, beta=beta1, prior=problem.prior, step=self.steps
        )

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs under one draw."""
        return predict_with(self._draw(), inputs)

    def _draw(self, *samples: int) -> Weights:
        noise = _noise(self.problem, self.state.means, *samples)
        return Weights(*block_tridiagonal.sample(self.state, noise, num_data=self.problem.splits.num_data))


def _chain(blocks: Blocks) -> ChainCurvature:
    return ChainCurvature((blocks.hidden, blocks.output), (blocks.link,))
