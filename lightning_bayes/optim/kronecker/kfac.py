"""K-FAC, Martens & Grosse 2015, https://arxiv.org/abs/1503.05671.

For a layer with matrix W (the bias is its last column), mean gradient ĝ, curvature S ⊗ A and prior precision per example
δ̃ = τδ/Ñ:

    every T_stats    S ← β₂ S + (1-β₂) Ŝ        A ← β₂ A + (1-β₂) Â        averaged separately
    every T_inv      S⁻ = (S + √(δ̃+γ)/π I)⁻¹    A⁻ = (A + π√(δ̃+γ) I)⁻¹     π-split of intrinsic and extrinsic damping
    every step       m ← β₁ m + (1-β₁)(ĝ + δ̃ W)
                     v = S⁻ m̂ A⁻                 m̂ = m / (1-β₁ᵗ)
                     W ← W - α v                 α = min(lr, √(c / Σ_layers vᵀ m̂)), see `optim.kronecker.kl_clip`

The averages start from the first measurement instead of zero or the identity, so they need no bias correction. Matrices may
have leading dimensions for the groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.kronecker.arguments import KroneckerArguments, KroneckerHyperparameters, split_arguments
from lightning_bayes.optim.kronecker.equations import LayerEquations
from lightning_bayes.optim.kronecker.estimator import KroneckerFactorsEstimator
from lightning_bayes.optim.kronecker.family import KroneckerFamily


class KFACState(NamedTuple):
    """The state of a layer that its step needs."""

    mean: Tensor  # W, [..., out, K], relative to the prior's mean
    momentum: Tensor  # m, [..., out, K]
    inverse: KroneckerProduct  # S⁻ [..., out, out] ⊗ A⁻ [..., K, K], as of the last inversion


class LayerStep(NamedTuple):
    """The update of a layer up to its length α, which all layers share."""

    momentum: Tensor  # m
    corrected: Tensor  # m̂; vᵀ F v = vᵀ m̂
    direction: Tensor  # v


def average_factors(curvature: KroneckerProduct, measured: KroneckerProduct, *, beta: float) -> KroneckerProduct:
    """Update the running averages of the two factors.

    Args:
        curvature: S ⊗ A of the mean negative log-likelihood, without the prior.
        measured: Ŝ ⊗ Â.
        beta: β₂, weight of the old factors.

    Returns:
        The new S ⊗ A.
    """
    return KroneckerProduct(*(average(old, new, beta) for old, new in zip(curvature, measured, strict=True)))


def damped_inverse(
    curvature: KroneckerProduct, *, prior: float, damping: float = 0.0, name: str = ""
) -> KroneckerProduct:
    """Invert the damped factors.

    Args:
        curvature: S ⊗ A.
        prior: δ̃.
        damping: γ.
        name: Name of the layer for error messages.

    Returns:
        (S + √(δ̃+γ)/π I)⁻¹ ⊗ (A + π√(δ̃+γ) I)⁻¹.
    """
    return pi_damped(curvature, prior + damping).inverse(f"layer {name!r}" if name else "a layer")


def update(state: KFACState, grad: Tensor, *, beta: float = 0.0, prior: float = 0.0, step: int = 1) -> LayerStep:
    """One K-FAC update of one layer, up to its length; pure.

    Args:
        state: State of the layer.
        grad: ĝ, mean gradient of the negative log-likelihood, ``[..., out, K]``.
        beta: β₁.
        prior: δ̃.
        step: Index of this update, from 1.

    Returns:
        m, m̂ and v = S⁻ m̂ A⁻.
    """
    momentum = average(state.momentum, grad + prior * state.mean, beta)
    corrected = debiased(momentum, beta, step)
    return LayerStep(momentum, corrected, state.inverse.matvec(corrected))


EQUATIONS = LayerEquations(KFACState, update, average_factors, damped_inverse)


@final
class KFAC(MeanFieldOptimizer):
    """K-FAC as a `torch.optim.Optimizer`, without noise and without a posterior.

    It is the baseline of Zhang et al. 2018. Tune it before switching to `NoisyKFAC`. Linear layers and convolutions have
    Kronecker factors; all other parameters use VOGN's update.

    Args:
        model: See `MeanFieldOptimizer`.
        params: See `MeanFieldOptimizer`.
        **fields: See `KroneckerArguments`.

    Raises:
        HyperparameterError: If a value is out of range.
    """

    noisy = False
    averages_curvature = True
    can_graft = False
    default_step = "trust_region"  # with the user's step nothing of K-FAC would remain
    estimator = KroneckerFactorsEstimator()
    natural_update = staticmethod(vogn_update)
    hyperparameters = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ is per measurement, not per update

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **fields: Unpack[KroneckerArguments]
    ) -> None:
        self.settings, shared = split_arguments(type(self).__name__, model, fields)
        self.estimator = KroneckerFactorsEstimator(self.settings.factors)  # type: ignore[misc]
        super().__init__(model, params, own=self.settings.hyperparameters, **shared)

    def _make_family(self, optimizer: MeanFieldOptimizer) -> KroneckerFamily:
        return KroneckerFamily(optimizer, EQUATIONS, self.settings)
