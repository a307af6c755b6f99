"""nn.BatchNorm1d/2d/3d: y = γ x̂ + β with x̂ = (x - mean) / √(var + eps).

    c_i(γ) = Σ_t δ_it x̂_it        c_i(β) = Σ_t δ_it

In training mode mean and var are the batch's, so an example has no gradient of its own; c_i is **example i's term of
the batch gradient, at the batch's statistics**. The terms add up to the batch gradient exactly. In evaluation mode the
statistics are the running ones and c_i is the gradient of example i alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.registry import PerExample, Sums, add_sums, per_example_rule, square_rule

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@per_example_rule(nn.BatchNorm1d)
@per_example_rule(nn.BatchNorm2d, input_dims=4)
@per_example_rule(nn.BatchNorm3d, input_dims=5)
def batch_norm(layer: BatchNorm, x: Tensor, grad_output: Tensor) -> PerExample:
    """Per-example contributions; ``x`` and ``grad_output`` are ``[B, C, …]``."""
    mean, variance = _statistics(layer, x)
    delta_sum = grad_output.flatten(2).sum(2) if x.dim() > 2 else grad_output
    delta_x = (grad_output * x).flatten(2).sum(2) if x.dim() > 2 else grad_output * x
    return {"weight": (delta_x - delta_sum * mean) * torch.rsqrt(variance + layer.eps), "bias": delta_sum.clone()}


@square_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm_sums(layer: BatchNorm, x: Tensor, grad_output: Tensor) -> Sums:
    """Sums over the whole batch at once: chunks would each see statistics of their own."""
    total: Sums = {}
    for name, part in batch_norm(layer, x, grad_output).items():
        add_sums(total, name, part)
    return total


def _statistics(layer: BatchNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    if layer.training or layer.running_mean is None or layer.running_var is None:
        variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
        return mean, variance
    return layer.running_mean, layer.running_var


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm whose output for one example depends on the others."""
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm and (module.training or module.running_mean is None)
