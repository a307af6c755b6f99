"""Noisy K-FAC with correlations between neighbouring layers (NNG-BlkTri), Zhang et al. 2018, section 3.5.

It uses the approximation of Martens & Grosse 2015, section 4.3 (https://arxiv.org/abs/1503.05671): the blocks of the
curvature on and next to the diagonal are Kronecker products, and its inverse is block-tridiagonal; see
`linalg.block_tridiagonal`.

    W = M + √(τ/Ñ) F̂^{-½} E          F̂ from the old blocks, with diagonal blocks π-damped by δ̃ [+ γ]
    blocks ← β₂ blocks + (1-β₂) measured
    m ← β₁ m + (1-β₁)(ĝ + δ̃ M)
    M ← M - α F̂⁻¹ m̂                  F̂ from the new blocks, damped by δ̃ + γ

The functions take the matrices of all layers of a chain of `torch.nn.Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.dense.measurements import ChainFactors
from lightning_bayes.optim.dense.shell import DenseOptimizer, JointState, reduction_of
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.hyperparameters import OptimizerFields
from lightning_bayes.optim.kronecker.equations import average_factors
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, factors_at_precision
from lightning_bayes.optim.kronecker.moves import clipped_lr, fisher_norm
from lightning_bayes.optim.parameters import trainable
from lightning_bayes.posteriors import BlockTridiagonal, linear_chain
from lightning_bayes.posteriors.base import DEFAULT_LIMIT_MIB


class ChainCurvature(NamedTuple):
    """Curvature of the mean negative log-likelihood, prior not included."""

    blocks: tuple[KroneckerProduct, ...]  # S_ii ⊗ A_ii of each layer
    links: tuple[KroneckerProduct, ...]  # S_i,i+1 ⊗ A_i,i+1 of each pair of neighbours


class ChainState(NamedTuple):
    """State of a chain of layers."""

    means: tuple[Tensor, ...]  # M of each layer, [out, K]
    momenta: tuple[Tensor, ...]
    curvature: ChainCurvature


def damped_inverse(curvature: ChainCurvature, damping: float, names: Sequence[str] = ()) -> BlockTridiagonalInverse:
    """Return F̂⁻¹, with damping only in the diagonal blocks so that F̂ is positive definite."""
    damped = [pi_damped(block, damping) for block in curvature.blocks]
    return BlockTridiagonalInverse.of(damped, curvature.links, names)


def average_curvature(old: ChainCurvature, measured: ChainCurvature, *, beta: float) -> ChainCurvature:
    """Return the running average of blocks and links; `beta` is the weight of the old ones."""
    blocks = [average_factors(*pair, beta=beta) for pair in zip(old.blocks, measured.blocks, strict=True)]
    links = [average_factors(*pair, beta=beta) for pair in zip(old.links, measured.links, strict=True)]
    return ChainCurvature(tuple(blocks), tuple(links))


def sample(
    means: Sequence[Tensor],  # M of each layer
    covariance: BlockTridiagonalInverse,  # F̂⁻¹ of the noise, from the curvature before this update's measurement
    noise: Sequence[Tensor],  # standard normal, one matrix per layer
    *,
    num_data: float,  # Ñ = ρN
    kl_weight: float = 1.0,  # τ
) -> list[Tensor]:
    """Draw a posterior sample W of each layer."""
    scale = math.sqrt(kl_weight / num_data)
    return [mean + scale * offset for mean, offset in zip(means, covariance.root(noise), strict=True)]


def update(
    state: ChainState,
    grads: Sequence[Tensor],  # ĝ of each layer at the sample
    measured: ChainCurvature,  # blocks and links at the sample
    *,
    lr: float,  # α_max
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float,  # δ̃
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    kl_clip: float | None = None,  # bound c of `optim.kronecker.moves`; None for no bound
    invert: Callable[[ChainCurvature, float], BlockTridiagonalInverse] = damped_inverse,
) -> ChainState:
    """One update of the chain; pure."""
    curvature = average_curvature(state.curvature, measured, beta=betas[1])
    momenta = tuple(
        average(momentum, grad + prior * mean, betas[0])
        for momentum, grad, mean in zip(state.momenta, grads, state.means, strict=True)
    )
    corrected = [debiased(momentum, betas[0], step) for momentum in momenta]
    directions = invert(curvature, prior + damping).matvec(corrected)
    rate: float | Tensor = lr
    if kl_clip is not None:
        rate = clipped_lr(lr, fisher_norm(directions, corrected), kl_clip)[..., None, None]
    means = tuple(mean - rate * direction for mean, direction in zip(state.means, directions, strict=True))
    return ChainState(means, momenta, curvature)


@final
class ChainCovariance:
    """Blocks and links of a chain on tensors in the order of the parameters; see `optim.dense.shell.Equations`."""

    def __init__(self, params: Sequence[nn.Parameter], layers: list[MatrixLayer], kl_clip: float | None) -> None:
        self.params, self.layers, self.kl_clip = list(params), layers, kl_clip
        kinds = [f"factor_{i}" for i in range(len(layers))] + [f"link_{i}" for i in range(len(layers) - 1)]
        self.names = [f"{side}_{kind}" for kind in kinds for side in ("output", "input")]

    def initial(self, init_precision: float, hyper: Effective) -> list[Tensor]:
        """`factors_at_precision` of each layer, and zero links."""
        blocks = [factors_at_precision(layer, init_precision, hyper) for layer in self.layers]
        pairs = [pair for before, after in pairwise(blocks) for pair in zip(before, after, strict=True)]
        return [*chain.from_iterable(blocks), *(before.new_zeros(len(before), len(after)) for before, after in pairs)]

    def sample(self, curvature: list[Tensor], noise: list[Tensor], hyper: Effective) -> list[Tensor]:
        """Draw weights."""
        inverse = self._inverse(self._chain(curvature), hyper.prior + hyper.noise_damping)
        means, draws = self._matrices(self.params), self._matrices(noise)
        return self._tensors(sample(means, inverse, draws, num_data=hyper.num_data, kl_weight=hyper.kl_weight))

    def update(self, old: JointState, grads: list[Tensor], measured: list[Tensor], **numbers: Any) -> JointState:
        """Update the matrices."""
        state = ChainState(self._matrices(old.means), self._matrices(old.momenta), self._chain(old.curvature))
        arguments = {**numbers, "kl_clip": self.kl_clip, "invert": self._inverse}
        new = update(state, self._matrices(grads), self._chain(measured), **arguments)
        products = (*new.curvature.blocks, *new.curvature.links)
        return JointState(self._tensors(new.means), self._tensors(new.momenta), list(chain.from_iterable(products)))

    def posterior(self, curvature: list[Tensor], hyper: Effective, **shared: Any) -> BlockTridiagonal:
        """Damped blocks, and links, times Ñ/τ."""
        measured, names = self._chain(curvature), dict(zip(self.params, shared["mean"], strict=True))
        blocks = [pi_damped(block, hyper.prior + hyper.noise_damping) for block in measured.blocks]
        weights = [names[layer.weight] for layer in self.layers]
        return BlockTridiagonal(
            factors=dict(zip(weights, _scaled(blocks, hyper.scale), strict=True)),
            links=dict(zip(weights[:-1], _scaled(measured.links, hyper.scale), strict=True)),
            biases={names[layer.weight]: names[layer.params[1]] for layer in self.layers if layer.has_bias},
            **shared,
        )

    def _inverse(self, curvature: ChainCurvature, damping: float) -> BlockTridiagonalInverse:
        return damped_inverse(curvature, damping, [repr(layer.name) for layer in self.layers])

    def _chain(self, tensors: Sequence[Tensor]) -> ChainCurvature:
        """Join pairs S, A of the layers, then of neighbours."""
        products = tuple(KroneckerProduct(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True))
        return ChainCurvature(products[: len(self.layers)], products[len(self.layers) :])

    def _matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One matrix per layer, from tensors in the order of the parameters."""
        of_param = dict(zip(self.params, tensors, strict=True))
        return tuple(layer.join([of_param[param] for param in layer.params]).detach() for layer in self.layers)

    def _tensors(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in the order of the parameters, from one matrix per layer."""
        of_param: dict[nn.Parameter, Tensor] = {}
        for layer, matrix in zip(self.layers, matrices, strict=True):
            of_param.update(zip(layer.params, layer.split(matrix), strict=True))
        return [of_param[param] for param in self.params]


def _scaled(products: Sequence[KroneckerProduct], scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(scale * product.left, product.right.clone()) for product in products]


@final
class BlockTridiagonalKFAC(DenseOptimizer):
    """Noisy K-FAC with correlations between neighbouring layers (Zhang et al. 2018, section 3.5).

    It measures, averages and inverts the factors in every update.

    Args:
        model: A chain of trainable linear layers with element-wise activations in between.
        fisher: ``"sampled"`` samples labels from the likelihood, ``"empirical"`` uses the data's labels. None samples labels
            if there is a likelihood.
        likelihood: The likelihood of the model's outputs; None uses the model's attribute ``lightning_bayes_likelihood``.
        kl_clip: Bound c on the squared Fisher norm of the step, see `optim.kronecker.moves`; None for no bound.
        limit_mib: Maximum memory of the factors in MiB.
        **arguments: See `DenseOptimizer`.

    Example:
        >>> import torch
        >>> model, x, y = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = BlockTridiagonalKFAC(model, lr=0.1, num_data=4)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> [factor.shape for factor in opt.posterior().links["0.weight"]]  # [out, next out], [in + 1, next in + 1]
        [torch.Size([3, 1]), torch.Size([3, 4])]
    """

    needs_chain = True  # a model of linear layers that feed one another

    def __init__(
        self,
        model: nn.Module,
        *,
        fisher: FisherName | None = None,
        likelihood: OutputLikelihood | None = None,
        kl_clip: float | None = None,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        **arguments: Unpack[OptimizerFields],
    ) -> None:
        linear_chain(model, limit_mib)
        params, reduction = trainable(model), reduction_of(arguments)
        measurement = ChainFactors(model, params, "BlockTridiagonalKFAC", fisher, likelihood, reduction)
        super().__init__(model, ChainCovariance(params, measurement.layers, kl_clip), measurement, arguments)
