"""Own parameters of a module that contains BatchNorm, such as the scale of a residual branch.

    c_i = (∂ f(X; θ) / ∂θ)ᵀ (e_i ⊙ δ)

f is the module applied to the whole batch X, because single examples have no batch statistics. e_i ⊙ δ is the gradient of
the output with all rows except the i-th set to zero. So c_i is the contribution of output row i, as in the layer rules, and
the c_i add up to the gradient. The children of the module have their own rules. The cost is a second forward, and one
backward pass from the output to θ per example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, same_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall, used_outputs
from lightning_bayes.curvature.rules.stateless import call_with
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


@final
class WholeBatch(ReplayedCall):
    """A call that is repeated for the whole batch with the random numbers of the forward; see `ReplayedCall`."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: Workspace | None = None
    ) -> None:
        _require_one_process(module)
        super().__init__(module, args, kwargs, workspace)

    def forward(self, params: dict[str, Tensor], is_checked: Callable[[], bool] = lambda: True) -> Any:
        """See `ReplayedCall.forward`."""
        before = rng_state()
        output = call_with(self.module, params, *self.inputs.arguments())
        if not same_rng(before, rng_state()):
            self._rng_state = before
        if not is_checked():
            self.keep_for_check(differentiable(output)[0])
        return output

    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], sums: Sums) -> None:
        """Require that a repeated call returns the same outputs; the contributions of rows always add up."""
        indices, _ = used_outputs(grads)
        self.require_same(self.vjp(params, indices)[0], indices)

    def _visit(
        self, params: dict[str, Tensor], grads: list[Tensor | None], visit: Callable[[PerExample], None]
    ) -> None:
        count = self.inputs.batch_size
        indices, cotangents = used_outputs(grads)
        _, vjp = self.vjp(params, indices)
        for grad in cotangents:
            if len(grad) != count:
                raise ExampleDimensionError(
                    f"{type(self.module).__name__} got {count} examples and returned a tensor of shape {list(grad.shape)}. "
                    "Keep the examples in dimension 0, or freeze the module's own parameters."
                )
        size = self.workspace.examples_at_once(sum(tensor.numel() for tensor in (*cotangents, *params.values())))
        for start in range(0, count, size):
            rows = torch.arange(start, min(start + size, count))
            visit(_vectorised(lambda row_grads: vjp(row_grads)[0], [_single_rows(grad, rows) for grad in cotangents]))


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


def _vectorised(contribution: Callable[[list[Tensor]], PerExample], stacked: list[Tensor]) -> PerExample:
    try:
        contributions: PerExample = torch.vmap(contribution)(stacked)
    except RuntimeError:  # an operation without a batching rule
        parts = [contribution(list(grads)) for grads in zip(*stacked, strict=True)]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return contributions
