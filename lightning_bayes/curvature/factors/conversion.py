"""A layer's curvature in two forms: one matrix with the bias as its last column, or weight and bias each on its own.

With T positions of an example, patches a_it, ā = (a, 1) and output gradients δ_it, this package has for a whole layer

    S = (1/(nT)) Σ_i Σ_t δ_it δ_itᵀ        Ā = (1/n) Σ_i Σ_t ā_it ā_itᵀ = [[A, m], [mᵀ, T]]        block ≈ S ⊗ Ā

and `measure` gives by parameter

    weight: S ⊗ A        bias: T S        m is the block between them, which this form leaves out

BackPACK's KFAC, KFLR and KFRA have weight and bias each on its own, both with the factor

    S' = (1/n) Σ_i (Σ_t δ_it)(Σ_t δ_it)ᵀ        A' = A

summed over positions **before** the product. For the bias S' is the exact block. For the weight S' ⊗ A would count the T
positions twice, so here S = S'/T: the block is then right where positions are alike (T² times one of them) and where their
gradients are uncorrelated (T times one of them), as is S above in the latter case alone. With T = 1, every linear layer,
S = S' and nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from lightning_bayes.curvature.measurement import KroneckerFactors

_WEIGHT_GRADIENTS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: conv1d_weight,
    nn.Conv2d: conv2d_weight,
    nn.Conv3d: conv3d_weight,
}


def join_bias(inputs: Tensor, mean_input: Tensor, positions: int) -> Tensor:
    """Ā from its parts.

    Args:
        inputs: A, ``[K, K]``.
        mean_input: m, ``[K]``.
        positions: T.

    Returns:
        ``[K + 1, K + 1]``.

    Example:
        >>> join_bias(torch.tensor([[5.0]]), torch.tensor([2.0]), 1)
        tensor([[5., 2.],
                [2., 1.]])
    """
    corner = inputs.new_full((1, 1), positions)
    border = mean_input[:, None]
    return torch.cat([torch.cat([inputs, border], 1), torch.cat([border.mT, corner], 1)])


def split_bias(factors: KroneckerFactors) -> tuple[KroneckerFactors, KroneckerFactors]:
    """Weight and bias, each on its own.

    Args:
        factors: (S, Ā) of a layer, ``[out, out]`` and ``[K + 1, K + 1]``.

    Returns:
        (S, A) of the weight and (T S,) of the bias.

    Example:
        >>> weight, bias = split_bias(KroneckerFactors((torch.eye(1), torch.tensor([[5.0, 2.0], [2.0, 3.0]]))))
        >>> weight.factors[1], bias.factors
        (tensor([[5.]]), (tensor([[3.]]),))
    """
    outputs, inputs = factors.factors
    weight = inputs[..., :-1, :-1].contiguous()
    return KroneckerFactors((outputs, weight)), KroneckerFactors((outputs * inputs[..., -1:, -1:],))


def summed_patches(layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
    """m, the sum of the patches over positions, averaged over examples.

    Args:
        layer: ``nn.Linear`` with inputs ``[B, in]``, or a convolution without groups that pads with zeros.
        x: Its input.
        output_shape: Shape of its output, ``[B, out, …]``.

    Returns:
        ``[K]``.
    """
    if isinstance(layer, nn.Linear):
        return x.mean(0)
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    gradient = _WEIGHT_GRADIENTS[type(layer)](
        x,
        (1, *layer.weight.shape[1:]),
        x.new_full((len(x), 1, *output_shape[2:]), 1 / len(x)),
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
    )
    return gradient.flatten()
