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
linear layer without positions, S = S'. Ā is always this package's, because BackPACK omits m.
"""

from __future__ import annotations

from lightning_bayes.curvature.measurement import KroneckerFactors


def split_bias(factors: KroneckerFactors) -> tuple[KroneckerFactors, KroneckerFactors]:
    """Separate the joint factors of a layer into factors of the weight and of the bias.

    Args:
        factors: (S, Ā), ``[out, out]`` and ``[K + 1, K + 1]``.

    Returns:
        (S, A) for the weight and (T S,) for the bias.

    Example:
        >>> import torch
        >>> weight, bias = split_bias(KroneckerFactors((torch.eye(1), torch.tensor([[5.0, 2.0], [2.0, 3.0]]))))
        >>> weight.factors[1], bias.factors
        (tensor([[5.]]), (tensor([[3.]]),))
    """
    outputs, inputs = factors.factors
    weight = inputs[..., :-1, :-1].contiguous()
    return KroneckerFactors((outputs, weight)), KroneckerFactors((outputs * inputs[..., -1:, -1:],))
