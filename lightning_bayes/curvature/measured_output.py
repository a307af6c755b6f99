"""The autograd function that measures a layer's call during backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bayes.curvature.train_mode import in_train_modes
from lightning_bayes.errors import BayesError, UnsupportedLayerError, UnsupportedTrainingError

if TYPE_CHECKING:
    from lightning_bayes.curvature.layer_calls import LayerCall


class MeasuredOutput(torch.autograd.Function):
    """The identity on a unit's outputs. Its backward measures the call and returns the parameter gradients."""

    @staticmethod
    def forward(ctx: Any, record: LayerCall, inputs: list[Any], num_outputs: int, *tensors: Tensor) -> Any:
        """Return the outputs. `tensors` are the outputs, followed by the leaves whose gradients the call computes."""
        ctx.record, ctx.num_leaves = record, len(tensors) - num_outputs
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        # Detached tensors share the version counter, so autograd still detects an input that was changed in place.
        ctx.save_for_backward(*(x.detach() for x in inputs if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        outputs = tensors[:num_outputs]
        ctx.mark_dirty(*outputs)
        return outputs[0] if num_outputs == 1 else outputs

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
            params = ctx.record.backward(inputs, list(grads))
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
    """The inputs of the call that created a node of `MeasuredOutput`."""
    saved = iter(node.saved_tensors)
    return [next(saved) if is_tensor else x for is_tensor, x in zip(node.is_tensor, node.others, strict=True)]


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context manager that disables autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def replay_errors_named(label: str) -> Iterator[None]:
    """Name the module in the error if it fails to run on single examples."""
    try:
        yield
    except (BayesError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UnsupportedLayerError(
            f"{label} has no curvature rule, and it cannot run on one example of its batch at a time. Pass inputs with "
            "the examples in dimension 0, write a rule (see curvature/rules/layer_norm.py), or freeze the parameters with "
            f"requires_grad_(False). Its error: {str(error)[:200]}"
        ) from error
