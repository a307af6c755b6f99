"""ĥ = ĝ², the square of the batch's mean gradient: micro-batches under one weight sample add up before the square.

With x_k = Σ_{p∈k} n_p ĝ_p / n and w_k = Σ_{p∈k} n_p / n over the passes p under the sample k, n = Σ_p n_p,

    ĥ = Σ_k w_k (x_k / w_k)² = Σ_k x_k² / w_k

where x_k and w_k are linear in the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass


class _Key(NamedTuple):
    sample: int
    param: nn.Parameter | None  # None for the weight w_k


@final
class BatchSquare(CurvatureEstimator):
    """Reads the gradient of each weight sample, and squares it once all passes are in."""

    def read(
        self, finished: FinishedPass, params: Sequence[nn.Parameter], precision: Callable[[nn.Parameter], Tensor]
    ) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        grads = finished.gradients(params)
        found: Curvature = {_Key(finished.sample, param): grad for param, grad in grads.items()}
        return {**found, _Key(finished.sample, None): params[0].new_ones(())}

    def join_ranks(
        self,
        curvature: Curvature,
        num_examples: float,
        params: Sequence[nn.Parameter],
        add_ranks: Callable[[list[Tensor]], None],
    ) -> None:
        """Add up the gradients of each weight sample over processes; see `CurvatureEstimator`."""
        for sample in sorted({key.sample for key in curvature if isinstance(key, _Key)}):
            weight = curvature[_Key(sample, None)]
            sums = [curvature.setdefault(_Key(sample, param), torch.zeros_like(param)) for param in params]
            torch._foreach_mul_([weight, *sums], num_examples)
            add_ranks([weight, *sums])
            torch._foreach_div_([weight, *sums], num_examples)

    def finalise(self, curvature: Curvature) -> Curvature:
        """Square each sample's gradient; see `CurvatureEstimator`."""
        # Over processes the weights of an update may add up to more than 1.
        total = sum(weight for key, weight in curvature.items() if isinstance(key, _Key) and key.param is None)
        found: Curvature = {}
        for key, grad in curvature.items():
            if isinstance(key, _Key) and key.param is not None:
                weight = curvature[_Key(key.sample, None)]
                square = torch.square(grad).div_(weight * total)
                found[key.param] = found[key.param].add_(square) if key.param in found else square
        return found
