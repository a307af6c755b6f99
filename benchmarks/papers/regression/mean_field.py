"""Mean-field methods: the package's pure updates on the flattened weights of every split.

Each step draws K samples θ = μ + ε / √(N (s + δ̃)), measures ĝ and ĥ there, and passes their means to ``update(state, ĝ,
ĥ)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import Tensor

from benchmarks.papers.regression.data import Batch
from benchmarks.papers.regression.learner import Learner, Problem, predict_with
from benchmarks.papers.regression.network import Trace, Weights, forward, mean_gradient, mean_square_gradient, unflatten
from lightning_bayes.optim.diagonal import bbb, noisy_adam, vadam, vogn
from lightning_bayes.optim.diagonal.state import MeanFieldState

Measure: TypeAlias = Literal["squared_gradients", "fisher", "batch_square", "reparameterised"]


@dataclass(frozen=True)
class Algorithm:
    """A mean-field method."""

    state_type: Callable[..., Any]
    update: Callable[..., Any]
    measure: Measure
    start: float = 1.0
    prior_at_sample: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@final
class MeanFieldLearner(Learner):
    """All splits with one `Algorithm`."""

    def __init__(self, problem: Problem, algorithm: Algorithm) -> None:
        super().__init__(problem)
        self.algorithm = algorithm
        weights = problem.start()
        self.sides = weights.hidden.shape[-2:]
        mean = weights.flat()
        zeros = [torch.zeros_like(mean) for _ in range(len(algorithm.state_type._fields) - 2)]  # type: ignore[attr-defined]
        self.state = algorithm.state_type(mean, torch.full_like(mean, algorithm.start), *zeros)

    def step(self, batch: Batch, lr: float) -> None:
        """One update."""
        problem, state = self.problem, self.state
        precision = problem.splits.num_data * (state.curvature + problem.prior)
        samples = state.mean + problem.randn(self.mc_samples, *state.mean.shape) * precision.rsqrt()
        weights = self._matrices(samples)
        trace = forward(weights, batch.inputs)
        output_grads = self.output_gradients(trace, batch)
        grads = mean_gradient(weights, trace, output_grads).flat()
        if self.algorithm.measure == "reparameterised":
            measured = grads * (samples - state.mean) * precision
        else:
            measured = self._measure(weights, trace, output_grads, grads)
        if self.algorithm.prior_at_sample:
            grads = grads + problem.prior * (samples - state.mean)
        self.state = self.algorithm.update(
            state,
            grads.mean(0),
            measured.mean(0),
            lr=lr,
            betas=problem.setting.betas,
            prior=problem.prior,
            step=self.steps,
            **self.algorithm.options,
        )

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs under one weight sample."""
        state, problem = self.state, self.problem
        std = (problem.splits.num_data * (state.curvature + problem.prior)).rsqrt()
        return predict_with(self._matrices(state.mean + std * problem.randn(*state.mean.shape)), inputs)

    def _matrices(self, flat: Tensor) -> Weights:
        return unflatten(flat, *self.sides)

    def _measure(self, weights: Weights, trace: Trace, output_grads: Tensor, grads: Tensor) -> Tensor:
        if self.algorithm.measure == "batch_square":
            return grads.square()
        if self.algorithm.measure == "fisher":
            output_grads = self.problem.noise.precision().sqrt()[:, None].expand_as(output_grads)
        return mean_square_gradient(weights, trace, output_grads).flat()


ALGORITHMS: Final = {
    "bbb": Algorithm(bbb.BBBState, bbb.update, "reparameterised"),
    "noisy_adam": Algorithm(MeanFieldState, noisy_adam.update, "batch_square", prior_at_sample=True),
    "noisy_adam_fisher": Algorithm(MeanFieldState, noisy_adam.update, "fisher", prior_at_sample=True),
    "vadam": Algorithm(MeanFieldState, vadam.update, "batch_square", start=0.0, options={"from_zero": True}),
    "vogn": Algorithm(MeanFieldState, vogn.update, "squared_gradients"),
}
