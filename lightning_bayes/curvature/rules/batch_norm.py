"""nn.BatchNorm1d/2d/3d, and nn.SyncBatchNorm in one process: y = γ x̂ + β with x̂ = (x - mean) / √(var + eps).

    c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it

In training mode, mean and var are batch statistics, so a single example has no separate gradient. Here c_i is **example i's
term of the batch gradient, at the batch statistics**. The terms add up to the batch gradient exactly. In evaluation mode,
the layer uses running statistics, and c_i is the gradient of example i alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.curvature.checkpointing import in_checkpoint
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, add_sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.private_torch import BatchNormBase, saved_by

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
Statistics: TypeAlias = tuple[Tensor, Tensor]  # mean and 1/√(var + eps), each [C]
_INPUT_DIMS = {nn.BatchNorm1d: 2, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5, nn.SyncBatchNorm: 2}


@layer_rule(
    *_INPUT_DIMS,
    parameters=("weight", "bias"),
    input_dims=lambda layer: next(dims for kind, dims in _INPUT_DIMS.items() if isinstance(layer, kind)),
    applies=lambda layer: not joins_processes(layer),
    cases=[
        (lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
        (lambda: nn.BatchNorm1d(4).eval(), (5, 4, 6)),
        (lambda: nn.BatchNorm2d(4).eval(), (5, 4, 3, 3)),
        (lambda: nn.BatchNorm3d(4).eval(), (5, 4, 2, 3, 3)),
        (lambda: nn.SyncBatchNorm(4).eval(), (5, 4, 6)),
    ],
)
def batch_norm(layer: BatchNorm, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, C, …]``."""
    (x,) = inputs
    return _terms(x, grad_output, statistics_of(layer, x), torch.empty_like(x))


@batch_norm.fast_sums
def batch_norm_sums(
    layer: BatchNorm, inputs: Inputs, grad_output: Tensor, workspace: Workspace, saved: Statistics | None = None
) -> Sums:
    """Sums over the whole batch at once, because parts of it would have other batch statistics."""
    (x,) = inputs
    total: Sums = {}
    products = workspace.empty("products", x.shape, x)
    for name, part in _terms(x, grad_output, saved or statistics_of(layer, x), products).items():
        add_sums(total, name, part)
    return total


@batch_norm.saved_from_forward
def batch_statistics(layer: BatchNorm, output: Tensor) -> Statistics | None:
    """The batch statistics that autograd saved in the forward; None if not saved, not used or in another precision."""
    if in_checkpoint():  # where reading them runs the forward of the segment again
        return None
    mean = saved_by(output.grad_fn, "result1")
    inverse_std = saved_by(output.grad_fn, "result2")
    if not uses_batch_statistics(layer) or mean is None or inverse_std is None or mean.dtype != layer.weight.dtype:
        return None
    return mean, inverse_std


def _terms(x: Tensor, grad_output: Tensor, statistics: Statistics, products: Tensor) -> PerExample:
    mean, inverse_std = statistics
    torch.mul(grad_output, x, out=products)
    delta_sum, delta_x = _over_positions(grad_output), _over_positions(products)
    return {"weight": (delta_x - delta_sum * mean) * inverse_std, "bias": delta_sum}


def _over_positions(values: Tensor) -> Tensor:
    return values.flatten(2).sum(2) if values.dim() > 2 else values.clone()


def statistics_of(layer: BatchNorm, x: Tensor) -> Statistics:
    """The mean and 1/√(var + eps) of the forward."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        # torch.var_mean is four times slower over these dimensions.
        _, mean, inverse_std = torch.native_batch_norm(x, None, None, None, None, True, 0.0, layer.eps)
        return mean, inverse_std
    return layer.running_mean, torch.rsqrt(layer.running_var + layer.eps)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm that normalises by batch statistics."""
    is_batch_norm = isinstance(module, BatchNormBase)
    return is_batch_norm and (module.training or module.running_mean is None)


def joins_processes(module: nn.Module) -> bool:
    """Whether `module` is a SyncBatchNorm, in training mode with the statistics of several processes' batches."""
    group: Any = getattr(module, "process_group", None)  # of a SyncBatchNorm; None means all processes
    has_group = isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized()
    return has_group and dist.get_world_size(group) > 1
