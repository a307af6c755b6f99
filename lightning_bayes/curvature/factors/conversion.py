"""Conversions between joint and separate curvature factors of a layer's weight and bias.

With T positions per example, patches a_it, ā = (a, 1) and output gradients δ_it, the joint factors of a layer are

    S = (1/(nT)) Σ_i Σ_t δ_it δ_itᵀ        Ā = (1/n) Σ_i Σ_t ā_it ā_itᵀ = [[A, m], [mᵀ, T]]        block ≈ S ⊗ Ā

`measure` returns separate factors, which omit the block m between weight and bias:

    weight: S ⊗ A        bias: T S

BackPACK's KFAC, KFLR and KFRA also separate weight and bias. Both use

    S' = (1/n) Σ_i (Σ_t δ_it)(Σ_t δ_it)ᵀ        A' = A

which sums over positions **before** the product. S' is the exact block of the bias. For the weight, S' ⊗ A would count the T
positions twice, so the conversion uses S = S'/T. This block is right for identical positions (T² times one of them) and for
uncorrelated gradients (T times one of them); the S above is right only for uncorrelated gradients. With T = 1, as in every
linear layer without positions, S = S'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.rules.conv.examples import WEIGHT_GRADIENTS


def join_bias(inputs: Tensor, mean_input: Tensor, positions: int) -> Tensor:
    """Assemble Ā.

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
    """Separate the joint factors of a layer into factors of the weight and of the bias.

    Args:
        factors: (S, Ā), ``[out, out]`` and ``[K + 1, K + 1]``.

    Returns:
        (S, A) for the weight and (T S,) for the bias.

    Example:
        >>> weight, bias = split_bias(KroneckerFactors((torch.eye(1), torch.tensor([[5.0, 2.0], [2.0, 3.0]]))))
        >>> weight.factors[1], bias.factors
        (tensor([[5.]]), (tensor([[3.]]),))
    """
    outputs, inputs = factors.factors
    weight = inputs[..., :-1, :-1].contiguous()
    return KroneckerFactors((outputs, weight)), KroneckerFactors((outputs * inputs[..., -1:, -1:],))


def summed_patches(layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
    """The patches m ``[K]``, summed over positions and averaged over examples; without groups, with zero padding."""
    if isinstance(layer, nn.Linear):
        return x.mean(0)
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    gradient: Tensor = WEIGHT_GRADIENTS[x.dim() - 3](
        x,
        (1, *layer.weight.shape[1:]),
        x.new_full((len(x), 1, *output_shape[2:]), 1 / len(x)),
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
    )
    return gradient.flatten()
