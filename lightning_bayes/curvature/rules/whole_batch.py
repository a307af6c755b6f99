"""Parameters that a module with BatchNorm inside holds itself, such as the scale of a residual branch.

    c_i = (∂ f(X; θ) / ∂θ)ᵀ (e_i ⊙ δ)

f is the module on the whole batch X, whose batch statistics single examples do not have, and e_i ⊙ δ the gradient of its
output with all rows but the i-th set to zero. So c_i is what row i of the output contributes, as in the rules of layers, and
the c_i add up to the gradient. The children are measured by rules of their own. It costs a second forward, and for each
example a backward pass from the output to θ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import uses_batch_statistics
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, same_rng, with_rng
from lightning_bayes.curvature.rules.registry import PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall
from lightning_bayes.curvature.rules.stateless import call_with
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError


@final
class WholeBatch(ReplayedCall):
    """A call that is repeated for the whole batch, with the random numbers of the forward; see `ReplayedCall`."""

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

    def gradient(self, params: dict[str, Tensor], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """See `ReplayedCall.gradient`."""
        _, vjp, cotangents = self._run(params, grads)
        found: dict[str, Tensor] = vjp(cotangents)[0]
        return found

    def check_sum(self, params: dict[str, Tensor], grads: list[Tensor | None], found: Sums) -> None:
        """Require the forward's outputs from a repeated call; the contributions of rows always add up."""
        self.require_same(self._run(params, grads)[0], [i for i, grad in enumerate(grads) if grad is not None])

    def _run(
        self, params: dict[str, Tensor], grads: list[Tensor | None]
    ) -> tuple[list[Tensor], Callable[..., Any], list[Tensor]]:
        """The outputs that the loss depends on, the function that takes their gradients to θ's, and these gradients."""
        used = [i for i, grad in enumerate(grads) if grad is not None]

        def outputs(own: dict[str, Tensor]) -> list[Tensor]:
            found = with_rng(self._rng_state, self.replay, own, self.inputs.leaves)
            return [found[i] for i in used]

        found, vjp, *_ = torch.func.vjp(outputs, params)
        return found, vjp, [grad for grad in grads if grad is not None]

    def _visit(
        self, params: dict[str, Tensor], grads: list[Tensor | None], visit: Callable[[PerExample], None]
    ) -> None:
        count = self.inputs.batch_size
        _, vjp, cotangents = self._run(params, grads)
        for grad in cotangents:
            if len(grad) != count:
                raise ExampleDimensionError(
                    f"{type(self.module).__name__} got {count} examples and returned a tensor of shape {list(grad.shape)}. "
                    "Keep the examples in dimension 0, or freeze the parameters that it holds itself."
                )
        size = self.workspace.examples_at_once(sum(tensor.numel() for tensor in (*cotangents, *params.values())))
        for start in range(0, count, size):
            rows = torch.arange(start, min(start + size, count))
            visit(_vectorised(lambda only: vjp(only)[0], [_rows_alone(grad, rows) for grad in cotangents]))


def _require_one_process(module: nn.Module) -> None:
    """Refuse statistics over the batches of several processes, which a repeated call would exchange again."""
    if any(isinstance(each, nn.SyncBatchNorm) and uses_batch_statistics(each) for each in module.modules()):
        raise UnsupportedLayerError(
            f"{type(module).__name__} has no rule of its own, and its SyncBatchNorm normalises over the batches of all "
            "processes. Use BatchNorm, whose statistics are those of one process, or freeze the module's parameters with "
            "requires_grad_(False)."
        )


def _rows_alone(grad: Tensor, rows: Tensor) -> Tensor:
    """``[k, B, …]``: a gradient ``[B, …]`` with a single row left, for each of k rows."""
    alone = grad.new_zeros(len(rows), *grad.shape)
    alone[range(len(rows)), rows] = grad[rows]
    return alone


def _vectorised(one: Callable[[list[Tensor]], PerExample], stacked: list[Tensor]) -> PerExample:
    try:
        found: PerExample = torch.vmap(one)(stacked)
    except RuntimeError:  # an operation without a batching rule
        each = [one(list(parts)) for parts in zip(*stacked, strict=True)]
        return {name: torch.stack([part[name] for part in each]) for name in each[0]}
    return found
