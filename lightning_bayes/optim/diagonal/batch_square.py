"""The gradient magnitude ĥ = ĝ²: an approximation of the Hessian's diagonal whose scale depends on the batch size.

RMSprop and Adam use the squared mean gradient of a minibatch as curvature. So do Vprop, Vadam, VadaGrad and Noisy Adam. Its
expectation over minibatches of M out of N examples is (Khan et al. 2018, Theorem 1, https://arxiv.org/abs/1806.04854)

    E[ĝ²] = w · mean_i g_i² + (1-w) · g²        w = (N-M) / (M (N-1)),  g = mean_i g_i

**The posterior therefore depends on the batch size.** M = 1 gives the diagonal of the empirical Fisher, as in VOGN. A larger
M gives about 1/M of it, so the noise is about √M times as large. M = N gives the squared full-batch gradient, which carries
no curvature, so that little more than the prior is left. M is the number of examples under one weight sample.

Micro-batches under one weight sample are summed before squaring. With x_k = Σ_{p∈k} n_p ĝ_p / n and w_k = Σ_{p∈k} n_p / n
over the passes p under the sample k, n = Σ_p n_p,

    ĥ = Σ_k w_k (x_k / w_k)² = Σ_k x_k² / w_k

where x_k and w_k are linear in the passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass, UpdateMeasurement


class _Key(NamedTuple):
    sample: int
    param: nn.Parameter | None  # None: the weight w_k


@final
class BatchSquare(CurvatureEstimator):
    """Accumulates the gradient of each weight sample and squares it once all passes are done."""

    is_linear = False

    def __init__(self, *, times_examples: bool = False) -> None:
        # Times M, ĥ does not depend on M where the gradients of the examples are independent with mean zero.
        self._times_examples = times_examples

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        sample, grads = finished.sample, finished.gradients(params)
        # Zeros where a rank did not reach a parameter, because ranks add up the same tensors.
        sums = {_Key(sample, p): grads[p] if p in grads else torch.zeros_like(p) for p in params}
        return {**sums, _Key(sample, None): params[0].new_ones(())}

    def degree_of(self, key: Any) -> int:
        """Gradients, and the weights of samples."""
        return 0 if isinstance(key, _Key) and key.param is None else 1

    def join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        """Sum the gradients of each weight sample over processes."""
        for sample in sorted({key.sample for key in curvature if isinstance(key, _Key)}):
            sums = [value for key, value in curvature.items() if isinstance(key, _Key) and key.sample == sample]
            torch._foreach_mul_(sums, num_examples)
            add_ranks(sums)
            torch._foreach_div_(sums, num_examples)

    def finalise(self, curvature: Curvature, groups: Sequence[Mapping[str, Any]], num_examples: float) -> Curvature:
        """Square each sample's gradient; times Ñ/τ in groups with ``scaling="sum"``."""
        # Summed over processes, the weights of an update may exceed 1.
        total = sum(weight for key, weight in curvature.items() if isinstance(key, _Key) and key.param is None)
        squares: Curvature = {}
        for key, grad in curvature.items():
            if isinstance(key, _Key) and key.param is not None:
                weight = curvature[_Key(key.sample, None)]
                square = torch.square(grad)
                square = square.mul_(num_examples / total) if self._times_examples else square.div_(weight * total)
                squares[key.param] = squares[key.param].add_(square) if key.param in squares else square
        for group in groups:
            if group["posterior"].get("scaling") == "sum":  # see `optim.diagonal.vprop`
                for param in squares.keys() & set(group["params"]):
                    squares[param] *= effective(group).scale
        return squares


@final
class BatchSizeCheck:
    """Warns if the batches of one optimizer, called `optimizer`, have the wrong size for `BatchSquare`."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._has_warned = False

    def __call__(self, measurement: UpdateMeasurement, group: Mapping[str, Any]) -> None:
        """Check the batches of one update with counted examples; `group` counts this update already."""
        is_dry_run = group["posterior"]["step"] == 1  # a single batch, such as fast_dev_run's, proves nothing
        if self._has_warned or is_dry_run or not group["posterior"]["noisy"] or not measurement.is_counted:
            return
        batch_size = measurement.num_examples / measurement.num_samples
        if text := self._complaint(batch_size, group):
            self._has_warned = True
            warnings.warn(text, stacklevel=4)

    def _complaint(self, batch_size: float, group: Mapping[str, Any]) -> str:
        num_data, is_of_sum = group["posterior"]["num_data"], group["posterior"].get("scaling") == "sum"
        if is_of_sum and batch_size < num_data:
            return (
                f"{self._optimizer} with scaling='sum' needs all {num_data} examples in one batch; with {batch_size:g} the "
                f"posterior precision is about {num_data / batch_size:.0f} times too large. Use scaling='mean', or VOGN."
            )
        if not is_of_sum and batch_size >= num_data > 1:
            return (
                f"{self._optimizer} uses the squared gradient of a batch as its curvature, and the batch holds all "
                f"{num_data} examples: near an optimum that is zero, whatever the curvature, so the posterior is about as "
                "wide as the prior. Use smaller batches, or VOGN."
            )
        return ""
