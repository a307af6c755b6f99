"""Own parameters of a module that contains BatchNorm, such as the scale of a residual branch.

    c_i = (∂ f(X; θ) / ∂θ)ᵀ (e_i ⊙ δ)

f is the module applied to the whole batch X, because single examples have no batch statistics. e_i ⊙ δ is the gradient of
the output with all rows except the i-th set to zero. So c_i is the contribution of output row i, as in the layer rules, and
the c_i add up to the gradient. The children of the module have their own rules. The cost is a second forward, and one
backward pass from the output to θ per example.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.registry import PerExample
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, in_parts, used_outputs
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


@final
class ReplayedBatch(ReplayedCall):
    """A call that is repeated for the whole batch with the random numbers of the forward; see `ReplayedCall`."""

    def forward(self) -> Any:
        """See `ReplayedCall.forward`."""
        _require_one_process(self.module)
        return super().forward()

    def _parts(self, grads: list[Tensor | None]) -> Iterator[PerExample]:
        num_examples = self.inputs.batch_size
        indices, cotangents = used_outputs(grads)
        _, pull_back = self._vjp(indices)
        for grad in cotangents:
            if len(grad) != num_examples:
                raise ExampleDimensionError(
                    f"{type(self.module).__name__} got {num_examples} examples and returned a tensor of shape "
                    f"{list(grad.shape)}. Keep the examples in dimension 0, or freeze the module's own parameters."
                )

        def select(start: int, count: int) -> list[Tensor]:
            return [_single_rows(grad, torch.arange(start, start + count)) for grad in cotangents]

        def contributions(*row_grads: Tensor) -> PerExample:
            gradient: PerExample = pull_back(list(row_grads))[0]
            return gradient

        size = self.workspace.examples_at_once(sum(t.numel() for t in (*cotangents, *self.measured.values())))
        yield from in_parts(contributions, select, [0] * len(cotangents), num_examples, size)


def _require_one_process(module: nn.Module) -> None:
    """Refuse SyncBatchNorm, because a repeated call would communicate with the other processes again."""
    if any(isinstance(part, nn.SyncBatchNorm) and uses_batch_statistics(part) for part in module.modules()):
        raise UnsupportedLayerError(
            f"{type(module).__name__} has no curvature rule, and its SyncBatchNorm normalises over the batches of all "
            "processes. Use BatchNorm, which normalises per process, or freeze the module's parameters with "
            "requires_grad_(False)."
        )


def _single_rows(grad: Tensor, rows: Tensor) -> Tensor:
    """For each of k rows, the gradient ``[B, …]`` with all other rows set to zero: ``[k, B, …]``."""
    masked = grad.new_zeros(len(rows), *grad.shape)
    masked[range(len(rows)), rows] = grad[rows]
    return masked
