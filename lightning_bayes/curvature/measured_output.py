"""The autograd function that measures a layer's call during backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bayes.errors import UnsupportedTrainingError

if TYPE_CHECKING:
    from lightning_bayes.curvature.layer_calls import LayerCall


class MeasuredOutput(torch.autograd.Function):
    """The identity on a unit's outputs. Its backward measures the call and returns the parameter gradients."""

    @staticmethod
    def forward(
        ctx: Any, record: LayerCall, inputs: tuple[Any, ...], num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs. `tensors` are the outputs, followed by the leaves whose gradients the call computes."""
        ctx.record, ctx.num_leaves = record, len(tensors) - num_outputs
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        # Detached tensors share the version counter, so autograd still detects an input that was changed in place.
        ctx.save_for_backward(*(x.detach() if isinstance(x, Tensor) else None for x in inputs))
        ctx.set_materialize_grads(False)
        outputs = tensors[:num_outputs]
        ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Pass the output gradients through, and measure the call for the parameter gradients."""
        if not torch.is_grad_enabled():
            return MeasuredOutput._measure(ctx, grads)
        with torch.no_grad():
            results = MeasuredOutput._measure(ctx, grads)
        leaf = torch.zeros((), requires_grad=True)
        guarded = iter(_NotTwice.apply(ctx.record.unit.label, leaf, *(grad for grad in results if grad is not None)))
        return tuple(None if grad is None else next(guarded) for grad in results)

    @staticmethod
    def _measure(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        not_tensors = (None, None, None)
        accumulators = [node for node, _ in ctx.next_functions if node is not None and "AccumulateGrad" in node.name()]
        if not ctx.record.should_measure(accumulators) or all(grad is None for grad in grads):
            return (*not_tensors, *grads, *(None for _ in range(ctx.num_leaves)))
        inputs = inputs_of(ctx)
        device = next(grad.device.type for grad in grads if grad is not None)
        with without_autocast(device), in_train_modes(ctx.record.modes):
            params = ctx.record.backward(inputs, [in_full_precision(grad) for grad in grads])
        return (*not_tensors, *grads, *params)


class _NotTwice(torch.autograd.Function):
    """The identity on gradients that refuses double backward: with detached parameters, it would miss terms."""

    @staticmethod
    def forward(ctx: Any, label: str, leaf: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.label = label
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if any(grad.any() for grad in grads):
            raise UnsupportedTrainingError(
                f"A gradient through {ctx.label} is differentiated again (create_graph=True, as in a gradient penalty). "
                "Per-example gradients do not support this. Remove this term, or detach the gradient."
            )
        return (None, None, *grads)


def inputs_of(node: Any) -> list[Any]:
    """The inputs of the call that created a node of `MeasuredOutput`, in full precision."""
    pairs = zip(node.saved_tensors, node.others, strict=True)
    return [other if saved is None else in_full_precision(saved) for saved, other in pairs]


def in_full_precision(value: Any) -> Any:
    """Convert half-precision tensors to float32: float16 underflows for squared gradients such as 1e-4²."""
    is_half = isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}
    return value.float() if is_half else value


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context manager that disables autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def in_train_modes(modes: Iterable[tuple[nn.Module, bool]]) -> AbstractContextManager[None]:
    """Measure layers in the modes of their forward: set training (True) or evaluation mode, and restore it on exit."""
    changed = [module for module, training in modes if module.training != training]
    return _switched(changed) if changed else nullcontext()


@contextmanager
def _switched(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.training = not module.training
    try:
        yield
    finally:
        for module in modules:
            module.training = not module.training
