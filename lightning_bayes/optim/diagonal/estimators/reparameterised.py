"""ĥ = ĝ (θ - μ) / Σ, an estimate of E_q[diag ∇²f] from a gradient and its noise (Price's theorem)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass


def reparameterised(grad: Tensor, sample: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """ĝ (θ - μ) / Σ, Khan et al. 2018 App. D.1; pure."""
    return grad * (sample - mean) * precision


@final
class Reparameterised(CurvatureEstimator):
    """Multiplies the gradient of a pass by its noise.

    A pass without noise carries no such information. Its squared gradient times its number of examples is used instead, as
    if the gradient were the mean of independent gradients with mean zero.
    """

    reads_count = True

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        reached = [param for param in params if param.grad is not None]
        curvature: Curvature = scores(reached)
        if curvature:
            torch._foreach_mul_(list(curvature.values()), [param.grad for param in curvature])
            if (factor := finished.gradient_factor) != 1:
                torch._foreach_mul_(list(curvature.values()), factor)
        for param, grad in finished.gradients(param for param in reached if param not in curvature).items():
            curvature[param] = grad.square_().mul_(finished.num_examples)
        return curvature
