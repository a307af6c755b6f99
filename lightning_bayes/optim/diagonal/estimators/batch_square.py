"""The gradient magnitude ĥ = ĝ² in place of a Hessian: what it measures, and where its posterior is known to be wrong.

RMSprop and Adam take the square of the minibatch's mean gradient for curvature, and so do Vprop, Vadam, VadaGrad and Noisy
Adam. Over minibatches of M of N examples its expectation is (Khan et al. 2018, Theorem 1, https://arxiv.org/abs/1806.04854)

    E[ĝ²] = w · mean_i g_i² + (1-w) · g²        w = (N-M) / (M (N-1)),  g = mean_i g_i

**The posterior therefore depends on the batch size.** M = 1 measures the empirical Fisher's diagonal, as VOGN does; a larger
M measures about 1/M of it, so the noise is about √M times as large; M = N measures the gradient's own square, which says
nothing of the curvature and leaves about the prior. M is the number of examples under one weight sample.

Micro-batches under one weight sample add up before the square. With x_k = Σ_{p∈k} n_p ĝ_p / n and w_k = Σ_{p∈k} n_p / n
over the passes p under the sample k, n = Σ_p n_p,

    ĥ = Σ_k w_k (x_k / w_k)² = Σ_k x_k² / w_k

where x_k and w_k are linear in the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.spread import local
from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass


class _Key(NamedTuple):
    sample: int
    param: nn.Parameter | None  # None for the weight w_k


@final
class BatchSquare(CurvatureEstimator):
    """Reads the gradient of each weight sample, and squares it once all passes are in."""

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        grads = finished.gradients(params)
        found: Curvature = {_Key(finished.sample, param): grad for param, grad in grads.items()}
        return {**found, _Key(finished.sample, None): local(params[0]).new_ones(())}

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

    def scaled(self, measured: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """ĝ², or (Ñ/τ) ĝ² where the group has ``scaling="sum"``, see `optim.diagonal.vprop`."""
        if group.get("scaling") != "sum":
            return measured
        return [square * effective(group).scale for square in measured]

    def warning(self, batch_size: float, group: Mapping[str, Any], optimizer: str) -> str:
        """Report batches of the wrong size; see `CurvatureEstimator`."""
        num_data, is_of_sum = group["num_data"], group.get("scaling") == "sum"
        if is_of_sum and batch_size < num_data:
            return (
                f"{optimizer} with scaling='sum' is made for all {num_data} examples in one batch; with {batch_size:g} its "
                f"posterior precision is about {num_data / batch_size:.0f} times too large. Use scaling='mean', or VOGN."
            )
        if not is_of_sum and batch_size >= num_data > 1:
            return (
                f"{optimizer} takes the squared gradient of a batch for its curvature, and the batch holds all {num_data} "
                "examples: near an optimum that is zero, whatever the curvature, so the posterior is about as wide as the "
                "prior. Use smaller batches, or VOGN."
            )
        return ""
