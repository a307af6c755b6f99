"""The measurement of a pass: the mean gradient and the mean curvature of each parameter.

This package has one scale convention: every measurement is a **mean over examples of the per-example quantity**, for the
loss without the prior. Let ℓ_i be the negative log-likelihood of example i (nats), g_i its gradient, f_i the model's
outputs, J_i = ∂f_i/∂θ and H_i = ∂²ℓ_i/∂f_i². Then

    grad = (1/n) Σ_i g_i

    squared_gradients = (1/n) Σ_i g_i²                  element-wise: diagonal of the empirical Fisher
    diag_ggn          = (1/n) Σ_i diag(J_iᵀ H_i J_i)    generalised Gauss-Newton, equal to the Fisher for these losses
    diag_ggn_mc       = the same, with H_i estimated from labels sampled from the model
    diag_hessian      = (1/n) Σ_i diag(∂²ℓ_i/∂θ²)       exact; may be negative
    kfac, kflr, kfra  ≈ (1/n) Σ_i J_iᵀ H_i J_i          one block per parameter, as a Kronecker product

KFAC (Martens & Grosse 2015, https://arxiv.org/abs/1503.05671) estimates H_i from labels sampled from the model. KFLR
propagates an exact square root of every H_i back to each layer; it equals the expectation of KFAC over the labels. KFRA
propagates one matrix, averaged over the examples at every layer (both Botev et al. 2017, https://arxiv.org/abs/1706.03662).
`curvature.factors` defines the factors of convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from torch import Tensor

SecondOrderDiagonal: TypeAlias = Literal["diag_ggn", "diag_ggn_mc", "diag_hessian"]
KroneckerQuantity: TypeAlias = Literal["kfac", "kflr", "kfra"]
DiagonalQuantity: TypeAlias = Literal["squared_gradients", SecondOrderDiagonal]
Quantity: TypeAlias = Literal[DiagonalQuantity, KroneckerQuantity]


@dataclass(frozen=True)
class KroneckerFactors:
    """The curvature block of one parameter as a Kronecker product.

    The block acts on the flattened parameter (``param.flatten()``, row by row): ``factors[0] ⊗ factors[1]``.

    Attributes:
        factors: Symmetric positive semi-definite matrices. For a weight ``[out, in]`` or ``[out, in, *kernel]`` they are
            S ``[out, out]`` from the output gradients and A ``[K, K]`` from the inputs, with K = in · ∏ kernel. A bias
            ``[out]`` has the single factor T S, with T positions, which is the block itself. S carries the scale. For a
            grouped convolution, the groups are dimension 0 of each factor.
    """

    factors: tuple[Tensor, ...]


CurvatureT = TypeVar("CurvatureT", Tensor, KroneckerFactors)


@dataclass(frozen=True)
class Measurement(Generic[CurvatureT]):
    """The result of `measure`.

    Attributes:
        loss: Detached scalar loss, on the closure's scale.
        grad: Mean gradient of each trainable parameter by name, shaped like the parameter.
        curvature: Mean curvature of each trainable parameter by name: a tensor shaped like the parameter, or
            `KroneckerFactors`.
        num_examples: n, the number of examples that counted in the loss.
    """

    loss: Tensor
    grad: dict[str, Tensor]
    curvature: dict[str, CurvatureT]
    num_examples: int
