"""MC-dropout, Gal & Ghahramani 2016, https://arxiv.org/abs/1506.02142: Adam on the squared error, masks on at test time.

Inputs and hidden units are dropped with probability p per example, in training and prediction. The penalty l² (1-p) / (2 N
τ) with l = 0.01 is, in the scale of the likelihood, a prior precision of l² (1-p).
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

from benchmarks.papers.uci.data import Batch
from benchmarks.papers.uci.learner import Learner, Problem
from benchmarks.papers.uci.network import Trace, forward, mean_gradient

LENGTH_SCALE: Final = 0.01


@final
class DropoutLearner(Learner):
    """All splits with MC-dropout."""

    def __init__(self, problem: Problem, probability: float) -> None:
        super().__init__(problem)
        self.probability = probability
        self.weights = problem.start()
        self.adam = torch.optim.Adam(self.weights, betas=problem.setting.betas)

    def step(self, batch: Batch, lr: float) -> None:
        """One update."""
        trace, dropped = self._forward(batch.inputs)
        grads = mean_gradient(self.weights, trace, trace.outputs - batch.targets, dropped)
        decay = LENGTH_SCALE**2 * (1 - self.probability) / self.problem.splits.num_data
        for matrix, grad in zip(self.weights, grads, strict=True):
            matrix.grad = grad + decay * matrix
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs under one sample of the masks."""
        return self._forward(inputs)[0].outputs

    def _forward(self, inputs: Tensor) -> tuple[Trace, Tensor]:
        trace = forward(self.weights, inputs * self._mask(inputs))
        mask = self._mask(trace.hidden)
        hidden = trace.hidden * mask
        return Trace(trace.inputs, hidden, (hidden @ self.weights.output.mT)[..., 0]), mask

    def _mask(self, values: Tensor) -> Tensor:
        keep = 1 - self.probability
        mask = torch.rand(values.shape, generator=self.problem.generator).lt(keep).to(values.dtype) / keep
        mask[..., -1] = 1.0  # the bias is not dropped
        return mask
