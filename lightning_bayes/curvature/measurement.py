"""The measurement of a pass: the mean gradient and the mean curvature, by parameter.

The one scale convention of this package: every measurement is a **mean over examples of the per-example quantity**, for
the loss without the prior. With ℓ_i example i's negative log-likelihood (nats), g_i its gradient, f_i the outputs that
the loss sees, J_i = ∂f_i/∂θ and H_i = ∂²ℓ_i/∂f_i²,

    grad = (1/n) Σ_i g_i

    squared_gradients = (1/n) Σ_i g_i²                  element-wise: the empirical Fisher's diagonal
    diag_ggn          = (1/n) Σ_i diag(J_iᵀ H_i J_i)    generalised Gauss-Newton, the Fisher of these losses
    diag_ggn_mc       = the same, with H_i estimated from labels that the model itself draws
    diag_hessian      = (1/n) Σ_i diag(∂²ℓ_i/∂θ²)       exact; may be negative
    kfac, kflr, kfra  ≈ (1/n) Σ_i J_iᵀ H_i J_i          one block for each parameter, as a Kronecker product

KFAC (Martens & Grosse 2015, https://arxiv.org/abs/1503.05671) estimates H_i from labels that the model itself draws. KFLR
carries an exact square root of every H_i back to each layer, so it is the mean of KFAC over labels; KFRA carries one matrix,
averaged over the examples at every layer (both Botev et al. 2017, https://arxiv.org/abs/1706.03662). The factors of
convolutions are in `curvature.factors.conversion`.
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
    """One parameter's block of a curvature matrix, as the Kronecker product of its factors.

    The block acts on the parameter flattened row by row (``param.flatten()``): ``factors[0] ⊗ factors[1]``.

    Attributes:
        factors: Symmetric positive semi-definite matrices. For a weight ``[out, in]`` or ``[out, in, *kernel]`` they are
            S ``[out, out]`` from the output gradients and A ``[K, K]`` from the inputs, with K = in · ∏ kernel; for a
            bias ``[out]`` T S alone, with T positions, which is the block itself. S carries the scale. Groups of a
            convolution are a first dimension of each.
    """

    factors: tuple[Tensor, ...]


CurvatureT = TypeVar("CurvatureT", Tensor, KroneckerFactors)


@dataclass(frozen=True)
class Measurement(Generic[CurvatureT]):
    """The result of `measure`.

    Attributes:
        loss: The closure's loss, detached, a scalar in the closure's own scale.
        grad: Mean gradient of each trainable parameter by name, shaped like the parameter.
        curvature: Mean of the per-example quantity by name: a tensor shaped like the parameter, or `KroneckerFactors`.
        num_examples: n, the number of examples that counted in the loss.
    """

    loss: Tensor
    grad: dict[str, Tensor]
    curvature: dict[str, CurvatureT]
    num_examples: int
