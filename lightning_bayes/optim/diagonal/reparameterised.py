"""The reparameterised estimate ĥ = ĝ (θ - μ) / Σ, Khan et al. 2018 App. D.1: E_q[ĥ] = E_q[diag ∇²f] by Price's theorem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.optim.diagonal.batch_square import BatchSquare
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass


@final
class Reparameterised(CurvatureEstimator):
    """Multiplies the gradient of a pass by its noise.

    Weights without noise carry no such information. The squared gradient of a weight sample times its number of examples is
    used instead, as if the gradient were the mean of independent gradients with mean zero.
    """

    is_linear = False
    reads_count = True

    def __init__(self) -> None:
        self._without_noise = BatchSquare(times_examples=True)

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        curvature: Curvature = scores(param for param in params if param.grad is not None)
        if curvature:
            torch._foreach_mul_(list(curvature.values()), [param.grad for param in curvature])
            if (factor := finished.gradient_factor) != 1:
                torch._foreach_mul_(list(curvature.values()), factor)
        without_noise = [param for param in params if param not in finished.means]
        return curvature | self._without_noise.read(finished, without_noise, scores) if without_noise else curvature

    def degree_of(self, key: Any) -> int:
        """Gradients, and the weights of samples."""
        return self._without_noise.degree_of(key)

    def join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        """Sum the gradients of weights without noise."""
        self._without_noise.join_ranks(curvature, num_examples, add_ranks)

    def finalise(self, curvature: Curvature, groups: Sequence[Mapping[str, Any]], num_examples: float) -> Curvature:
        """Square the gradients of weights without noise."""
        squares = self._without_noise.finalise(curvature, groups, num_examples)
        return {key: value for key, value in curvature.items() if isinstance(key, nn.Parameter)} | squares
