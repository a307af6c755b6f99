"""Own parameters of a module that contains BatchNorm, such as the scale of a residual branch, or that draws noise.

    c_i = (∂ f(X; θ) / ∂θ)ᵀ (e_i ⊙ δ)

f is the module applied to the whole batch X, because single examples have no batch statistics. e_i ⊙ δ is the gradient of
the output with all rows except the i-th set to zero. So c_i is the contribution of output row i, as in the layer rules, and
the c_i add up to the gradient. The children of the module have their own rules. The cost is a second forward, and one
backward pass from the output to θ per example.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.rules.batch_norm import joins_processes, uses_batch_statistics
from lightning_bayes.curvature.rules.random_numbers import with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, are_close, in_parts, used_outputs
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


@final
class ReplayedBatch(ReplayedCall):
    """A call that is repeated for the whole batch with the random numbers of the forward; see `ReplayedCall`."""

    @override
    def keep_for_check(self, outputs: list[Tensor]) -> None:
        _require_one_process(self.module)
        super().keep_for_check(outputs)

    def _check_sum(self, grads: list[Tensor | None], sums: Sums) -> dict[str, Tensor]:
        """Require also that examples are independent in a module with noise, where no sum would show the opposite."""
        gradient = super()._check_sum(grads, sums)
        outputs = self._outputs
        if outputs is None or any(map(uses_batch_statistics, self.module.modules())) or self.inputs.batch_size < 2:
            return gradient
        with torch.no_grad():
            repeated = with_rng(self._rng_state, self._replay, self.inputs.repeat_first())
        pairs = [(one[:1], other[:1]) for one, other in zip(outputs, repeated, strict=True) if one.dim()]
        if not all(are_close(*pair) for pair in pairs):
            raise ExampleDimensionError(
                f"The output of {type(self.module).__name__} for one example depends on the others in the batch. Keep the "
                "examples in dimension 0 and independent, or freeze its parameters with requires_grad_(False)."
            )
        return gradient

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
    if any(joins_processes(part) and uses_batch_statistics(part) for part in module.modules()):
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
