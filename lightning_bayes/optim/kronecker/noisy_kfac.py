"""Noisy K-FAC, Zhang et al. 2018, Algorithm 2, https://arxiv.org/abs/1712.02390.

    W = M + √(τ/Ñ) R_S E R_Aᵀ        E standard normal, R_S R_Sᵀ = (S + √γ'/π I)⁻¹, R_A R_Aᵀ = (A + π√γ' I)⁻¹

so that Cov(vec W) = (τ/Ñ) (S + √γ'/π I)⁻¹ ⊗ (A + π√γ' I)⁻¹. The gradient is computed at W; everything else is K-FAC
(`optim.kronecker.kfac`) for the mean M. The noise always includes the intrinsic damping δ̃ = τδ/Ñ, the prior. The extrinsic
damping γ is excluded in the paper (γ' = δ̃) and included in Osawa et al. 2019 (γ' = δ̃ + γ). The roots R are cached with the
inverses, so a pass samples from factors that are at most T_inv updates old and never include its own measurement.

The gradient of the prior is δ̃ M by default. The paper uses δ̃ W (``prior_at="sample"``), which has the same expectation and
more variance.

With ``relative_noise`` κ, the noise has the shape of the curvature and a size of κ r_l; `posteriors.shaped_noise` defines p:

    γ' = ε mean(diag S ⊗ A) + p        Ñ/τ_l = Ñ/τ + mean(diag (R_S R_Sᵀ ⊗ R_A R_Aᵀ)) / (κ r_l)²

so that W = M + R_S E R_Aᵀ / √(Ñ/τ_l) has the mean variance κ² r_l², unless the data require less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.kronecker import kfac
from lightning_bayes.optim.kronecker.arguments import KroneckerArguments, KroneckerHyperparameters, split_arguments
from lightning_bayes.optim.kronecker.estimator import KroneckerFactorsEstimator
from lightning_bayes.optim.kronecker.family import KroneckerFamily

PriorAt: TypeAlias = Literal["mean", "sample"]


def noise_root(
    curvature: KroneckerProduct, *, prior: float, damping: float | Tensor = 0.0, name: str = ""
) -> KroneckerProduct:
    """R_S ⊗ R_A; arguments as in `kfac.damped_inverse`, with γ = 0 if the noise excludes it."""
    return pi_damped(curvature, prior + damping).inverse_root(f"layer {name!r}" if name else "a layer")


def sample(
    mean: Tensor, root: KroneckerProduct, noise: Tensor, *, num_data: float | Tensor, kl_weight: float = 1.0
) -> Tensor:
    """Draw a layer's matrix.

    Args:
        mean: M, ``[..., out, K]``.
        root: R_S ⊗ R_A from before the measurement of this update.
        noise: E, standard normal, ``[..., out, K]``.
        num_data: Ñ = ρN.
        kl_weight: τ.

    Returns:
        W, ``[..., out, K]``.
    """
    return mean + (kl_weight / num_data) ** 0.5 * root.upper_matvec(noise)


def check_prior_at(prior_at: str) -> None:
    """Raise `HyperparameterError` unless `prior_at` is ``"mean"`` or ``"sample"``."""
    if prior_at not in get_args(PriorAt):
        raise HyperparameterError(f"prior_at={prior_at!r} must be 'mean' or 'sample'.")


EQUATIONS = kfac.EQUATIONS._replace(root=noise_root, sample=sample)


@final
class NoisyKFAC(MeanFieldOptimizer):
    """Noisy K-FAC as a `torch.optim.Optimizer`.

    Linear layers and convolutions have Kronecker factors and a matrix Gaussian posterior; all other parameters use VOGN's
    update.

    Args:
        model: See `MeanFieldOptimizer`.
        params: See `MeanFieldOptimizer`.
        prior_at: Where to compute the gradient of the prior: at the ``"mean"``, or at the ``"sample"`` as in the paper. The
            latter is part of the gradient of each pass, so gradient clipping includes it.
        **fields: See `KroneckerArguments`.

    Raises:
        HyperparameterError: If a value is out of range.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = NoisyKFAC(model, lr=0.1, num_data=4)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> [factor.shape for factor in opt.posterior().factors["weight"]]  # the bias is a column of the matrix
        [torch.Size([1, 1]), torch.Size([3, 3])]
    """

    noisy = True
    averages_curvature = True
    can_graft = False
    estimator = KroneckerFactorsEstimator()
    natural_update = staticmethod(vogn_update)
    hyperparameters = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ is per measurement, not per update

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        prior_at: PriorAt = "mean",
        **fields: Unpack[KroneckerArguments],
    ) -> None:
        check_prior_at(prior_at)
        self.prior_at_sample = prior_at == "sample"  # type: ignore[misc]
        self.settings, shared = split_arguments(type(self).__name__, model, fields)
        self.estimator = KroneckerFactorsEstimator(self.settings.factors)  # type: ignore[misc]
        super().__init__(model, params, own=self.settings.hyperparameters, **shared)

    def _make_family(self, optimizer: MeanFieldOptimizer) -> KroneckerFamily:
        return KroneckerFamily(optimizer, EQUATIONS, self.settings)
