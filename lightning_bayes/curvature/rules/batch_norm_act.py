"""timm's BatchNormAct2d: a BatchNorm and its activation in one layer, y = act(γ x̂ + β).

    c_i(γ) = Σ_t δ̃_it x̂_it        c_i(β) = Σ_t δ̃_it        δ̃ = act'(γ x̂ + β) δ

In training mode, c_i is example i's term of the batch gradient at the batch statistics; see `rules.batch_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.batch_norm import Statistics, batch_norm, batch_norm_sums, statistics_of
from lightning_bayes.curvature.rules.registry import Inputs, PerExample, Sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace


def _layer(**options: Any) -> nn.Module:
    from timm.layers.norm_act import BatchNormAct2d  # only the tests need timm

    layer: nn.Module = BatchNormAct2d(4, **options)
    return layer.eval()


@layer_rule(
    "timm.layers.norm_act.BatchNormAct2d",
    parameters=("weight", "bias"),
    input_dims=4,
    applies=lambda layer: isinstance(layer.drop, nn.Identity),
    cases=[
        (lambda: _layer(), (5, 4, 3, 3)),
        (lambda: _layer(act_layer="silu"), (5, 4, 3, 3)),
        (lambda: _layer(apply_act=False), (5, 4, 3, 3)),
    ],
)
def batch_norm_act(layer: Any, inputs: Inputs, grad_output: Tensor) -> PerExample:
    """Per-example contributions; the input and ``grad_output`` are ``[B, C, H, W]``."""
    statistics = statistics_of(layer, inputs[0])
    return batch_norm.contributions(layer, inputs, _before_activation(layer, inputs, grad_output, statistics))


@batch_norm_act.fast_sums
def batch_norm_act_sums(layer: Any, inputs: Inputs, grad_output: Tensor, workspace: Workspace) -> Sums:
    """Sums over the whole batch at once, as in `batch_norm_sums`."""
    statistics = statistics_of(layer, inputs[0])
    delta = _before_activation(layer, inputs, grad_output, statistics)
    return batch_norm_sums(layer, inputs, delta, workspace, statistics)


def _before_activation(layer: Any, inputs: Inputs, grad_output: Tensor, statistics: Statistics) -> Tensor:
    """δ̃, the gradient with respect to the activation's input."""
    (x,), (mean, inverse_std) = inputs, statistics
    scale = inverse_std * layer.weight.detach()
    shift = layer.bias.detach() - mean * scale
    pre_activation = torch.addcmul(shift.view(-1, 1, 1), x, scale.view(-1, 1, 1)).requires_grad_()
    with torch.enable_grad():
        output = layer.act(pre_activation.clone())  # in-place activations cannot modify a leaf
    (delta,) = torch.autograd.grad(output, pre_activation, grad_output)
    return delta
