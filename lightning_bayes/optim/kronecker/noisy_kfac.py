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

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.kronecker import kfac, layer_state
from lightning_bayes.optim.kronecker.arguments import KroneckerArguments
from lightning_bayes.optim.kronecker.kronecker_optimizer import KroneckerOptimizer
from lightning_bayes.optim.kronecker.layer_noise import PAIRS, LayerNoise
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.readout.shape import damping_of, determined, layer_damping, layer_scale
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass

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


@final
class NoisyKFAC(KroneckerOptimizer):
    """Noisy K-FAC as a `torch.optim.Optimizer`.

    Args:
        model: See `KroneckerOptimizer`.
        params: See `KroneckerOptimizer`.
        prior_at: Where to compute the gradient of the prior: at the ``"mean"``, or at the ``"sample"`` as in the paper. The
            latter is part of the gradient of each pass, so gradient clipping includes it.
        **fields: See `KroneckerOptimizer`.

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
    natural_update = staticmethod(vogn_update)
    layer_state_type = kfac.KFACState
    layer_update = staticmethod(kfac.update)
    average_factors = staticmethod(kfac.average_factors)

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        prior_at: PriorAt = "mean",
        **fields: Unpack[KroneckerArguments],
    ) -> None:
        check_prior_at(prior_at)
        self.prior_at = prior_at
        self._noises: dict[nn.Parameter, LayerNoise] = {}  # by the layer's weight
        super().__init__(model, params, **fields)

    # -- the noise ----------------------------------------------------------------------------------------------------

    def _kinds(self, layer: MatrixLayer) -> list[str]:
        return [*super()._kinds(layer), *(["root"] if self._is_noisy(layer) else [])]

    def _inverted(
        self, kind: str, layer: MatrixLayer, curvature: KroneckerProduct, hyperparameters: Effective
    ) -> KroneckerProduct:
        if kind == "inverse":
            return kfac.damped_inverse(
                curvature, prior=hyperparameters.prior, damping=hyperparameters.damping, name=layer.name
            )
        damping = layer_damping(curvature, hyperparameters)  # includes the prior
        return noise_root(curvature, prior=0.0, damping=damping, name=layer.name)

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        self._start_layers()
        drawn = super()._sample(noise)
        for layer in self._noisy_layers():
            values = [self._sampler.scratch(param) for param in layer.params]
            self._write_sample(layer, noise, values)
            drawn.update(zip(layer.params, values, strict=True))
        return drawn

    def _write_sample(self, layer: MatrixLayer, noise: CounterNoise, values: list[Tensor]) -> None:
        """Write a sample of a layer's matrix to `values`, which also hold its draws unless they come from a pool."""
        layer_noise, means = self._noise_of(layer), [param.detach() for param in layer.params]
        scale = layer_scale(layer_noise.mean_variance, self.state[layer.weight], means[0], effective(layer.group))
        # Several samples would evict each other from the memory of the pool.
        pool = noise.next_pool(PAIRS) if self.mc_samples == 1 else None
        if pool is None:
            noise.fill_(values)
            weights = sample(layer.matrix(means), layer_noise.root, layer.matrix(values), num_data=scale)
            torch._foreach_copy_(values, layer.tensors(weights))
            return
        factor = torch.as_tensor(scale, dtype=means[0].dtype, device=means[0].device).rsqrt() * noise.sign
        for value, mean, part in zip(values, means, layer.tensors(layer_noise.draw(pool)), strict=True):
            torch.addcmul(mean, part, factor, out=value)  # `sample`, in one pass over the weights

    def _noise_of(self, layer: MatrixLayer) -> LayerNoise:
        root, cached = layer_state.product(self.state[layer.weight], "root"), self._noises.get(layer.weight)
        assert root is not None
        if cached is None or not cached.is_of(root):
            cached = self._noises[layer.weight] = LayerNoise(root)
        return cached

    def _noisy_layers(self) -> list[MatrixLayer]:
        """The layers to sample: those with noise whose roots exist already."""
        noisy = [layer for layer in self._layers() if self._is_noisy(layer)]
        return [layer for layer in noisy if "input_root" in self.state[layer.weight]]

    def _is_noisy(self, layer: MatrixLayer) -> bool:
        return bool(layer.group["noisy"] and self.state[layer.weight]["noisy"])

    def _start_layers(self) -> None:
        """Initialise the factors of new layers from ``init_precision``, if it is set."""
        self._forget_other_shapes()
        for layer in self._layers():
            is_new = "input_factor" not in self.state[layer.weight]
            if is_new and self._is_noisy(layer) and layer.group["init_precision"] is not None:
                layer_state.start_at_precision(self.state[layer.weight], layer)
                self._invert_layer(layer)
                self._forget_single_curvatures(layer)

    def _start_noise(self) -> None:
        super()._start_noise()
        self._start_layers()

    def _determined(self) -> Iterator[Tensor]:
        yield from super()._determined()
        for layer in self._noisy_layers():
            state = self.state[layer.weight]
            curvature = layer_state.product(state, "factor")
            assert curvature is not None
            yield determined(curvature.diagonal(), damping_of(layer.group, state, layer.weight.detach()))

    # -- the prior at the sample --------------------------------------------------------------------------------------

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        curvature = super()._read_pass(finished)
        if self.prior_at == "sample":
            for group, param in self._trained():
                finished.add_prior_of_noise_(param, effective(group).prior * group["prior_on_mean"])
        return curvature
