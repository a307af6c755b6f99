"""What a method asks of a pass besides the gradient: its second quantity ĥ, in the scale of the mean loss's curvature.

    squared_gradients   ĥ = mean_i g_i²                 the empirical Fisher's diagonal, through the curvature engine
    batch_square        ĥ = ĝ²                          of the whole batch under one weight sample: the gradient magnitude
    reparameterised     ĥ = ĝ (θ - μ) / Σ               unbiased for E_q[diag ∇²f] (Price's theorem); may be negative
    diag_hessian        ĥ = mean_i diag ∇²ℓ_i           exact, through BackPACK; may be negative
    diag_ggn(_mc)       ĥ = mean_i diag J_iᵀ H_i J_i    exact or from sampled labels, through BackPACK
    kronecker           S and A of layers with matrices, and squared gradients of the others, when they are due

ĝ² is not linear in the passes: micro-batches under one weight sample add up before the square, samples after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Quantity

Measure: TypeAlias = Literal[
    "squared_gradients", "batch_square", "reparameterised", "diag_hessian", "diag_ggn", "diag_ggn_mc", "kronecker"
]
FROM_GRADIENT: tuple[Measure, ...] = ("batch_square", "reparameterised")


def engine_quantity(measure: Measure) -> Quantity | Literal["gradient", "kronecker"]:
    """What the engine measures for `measure`."""
    return "gradient" if measure in {"batch_square", "reparameterised"} else measure  # type: ignore[return-value]


def reparameterised(grad: Tensor, sample: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """ĝ (θ - μ) / Σ, Khan et al. 2018 App. D.1; pure.

    Args:
        grad: ĝ, mean gradient at the sample.
        sample: θ.
        mean: μ.
        precision: 1/Σ that θ was drawn with.

    Returns:
        An estimate of the Hessian's diagonal, averaged over q.
    """
    return grad * (sample - mean) * precision


class BatchSquares:
    """Mean over weight samples k of (ĝ_k)², where ĝ_k is the mean over all passes under sample k."""

    def __init__(self) -> None:
        self._passes: dict[int, tuple[float, dict[nn.Parameter, Tensor]]] = {}

    def add(self, sample: int, num_examples: float, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Fold one pass in.

        Args:
            sample: Number of its weight sample, k.
            num_examples: Its number of examples.
            grads: Its mean gradients, which this object keeps and changes.
        """
        known, sums = self._passes.get(sample, (0.0, {}))
        for param, grad in grads.items():
            weighted = grad.mul_(num_examples)
            sums[param] = sums[param].add_(weighted) if param in sums else weighted
        self._passes[sample] = (known + num_examples, sums)

    def join_ranks(self, params: Sequence[nn.Parameter], add_ranks: Callable[[list[Tensor]], None]) -> None:
        """Let the passes of other processes under the same weight samples add up before the square.

        Args:
            params: Parameters in an order that all ranks share.
            add_ranks: Replaces tensors by their sums over those processes.
        """
        for sample, (count, sums) in sorted(self._passes.items()):
            shared = {param: sums.get(param, torch.zeros_like(param)) for param in params}
            total = torch.tensor([count], device=params[0].device)
            add_ranks([total, *shared.values()])
            self._passes[sample] = (float(total), shared)

    def mean(self) -> dict[nn.Parameter, Tensor]:
        """The mean square by parameter; samples count by their examples."""
        total = sum(count for count, _ in self._passes.values())
        squares: dict[nn.Parameter, Tensor] = {}
        for count, sums in self._passes.values():
            for param, grad_sum in sums.items():
                square = torch.square(grad_sum / count).mul_(count / total)
                squares[param] = squares[param].add_(square) if param in squares else square
        return squares

    def clear(self) -> None:
        """Forget all passes."""
        self._passes.clear()
