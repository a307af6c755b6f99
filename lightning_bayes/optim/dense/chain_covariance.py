"""Equations of the block-tridiagonal covariance, on an optimizer's tensors.

`optim.dense.block_tridiagonal` has them on matrices.

The state of each layer's weight contains the layer's S and A as ``output_factor`` and ``input_factor``. Except in the last
layer, it also contains S and A between this layer and the next as ``output_link`` and ``input_link``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, final

from torch import Tensor, nn

from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, ChainState, damped_inverse, sample, update
from lightning_bayes.optim.dense.joint_optimizer import JointEquations, JointState
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.kronecker.layer_state import factors_at_precision
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.posteriors import BlockTridiagonal


@final
class ChainCovariance(JointEquations[BlockTridiagonal]):
    """Kronecker-factored blocks of each layer and of each pair of neighbouring layers.

    Args:
        params: The parameters.
        layers: The layers in the order of the chain.
        kl_clip: Bound c of `optim.kronecker.kl_clip`; None for no bound.
    """

    def __init__(self, params: Sequence[nn.Parameter], layers: list[MatrixLayer], kl_clip: float | None) -> None:
        self.params, self.layers, self.kl_clip = list(params), layers, kl_clip
        weights = [layer.weight for layer in layers]
        kinds = [*((weight, "factor") for weight in weights), *((weight, "link") for weight in weights[:-1])]
        self.places = [(weight, f"{side}_{kind}") for weight, kind in kinds for side in ("output", "input")]
        self._cached: tuple[Tensor, float, BlockTridiagonalInverse] | None = None  # for this factor and damping

    def initial(self, init_precision: float, effective: Effective) -> list[Tensor]:
        """Return `factors_at_precision` of each layer, and zero links; see `JointEquations.initial`."""
        blocks = [factors_at_precision(layer, init_precision, effective) for layer in self.layers]
        pairs = [pair for before, after in pairwise(blocks) for pair in zip(before, after, strict=True)]
        return [*chain.from_iterable(blocks), *(before.new_zeros(len(before), len(after)) for before, after in pairs)]

    def sample(self, curvature: list[Tensor], noise: list[Tensor], effective: Effective) -> list[Tensor]:
        """Draw weights; see `JointEquations.sample`."""
        weights = sample(
            self._matrices(self.params),
            self._invert(self._chain(curvature), effective.prior + effective.noise_damping),
            self._matrices(noise),
            num_data=effective.num_data,
            kl_weight=effective.kl_weight,
        )
        return self._tensors(weights)

    def update(self, state: JointState, grads: list[Tensor], measured: list[Tensor], **arguments: Any) -> JointState:
        """Call `block_tridiagonal.update`; see `JointEquations.update`."""
        new = update(
            ChainState(self._matrices(state.means), self._matrices(state.momenta), self._chain(state.curvature)),
            self._matrices(grads),
            self._chain(measured),
            kl_clip=self.kl_clip,
            invert=self._invert,
            **arguments,
        )
        products = (*new.curvature.blocks, *new.curvature.links)
        return JointState(self._tensors(new.means), self._tensors(new.momenta), list(chain.from_iterable(products)))

    def posterior(
        self, curvature: list[Tensor], names: dict[nn.Parameter, str], shared: dict[str, Any], effective: Effective
    ) -> BlockTridiagonal:
        """Damped blocks, and links, times Ñ/τ; see `JointEquations.posterior`."""
        measured = self._chain(curvature)
        blocks = [pi_damped(block, effective.prior + effective.noise_damping) for block in measured.blocks]
        weights = [names[layer.weight] for layer in self.layers]
        return BlockTridiagonal(
            factors=dict(zip(weights, _scaled(blocks, effective.scale), strict=True)),
            links=dict(zip(weights[:-1], _scaled(measured.links, effective.scale), strict=True)),
            biases={names[layer.weight]: names[layer.params[1]] for layer in self.layers if layer.has_bias},
            **shared,
        )

    def _invert(self, curvature: ChainCurvature, damping: float) -> BlockTridiagonalInverse:
        """Compute F̂⁻¹, cached for several passes, and for the step if it has the damping of the noise."""
        factor = curvature.blocks[0].left
        if self._cached is None or self._cached[0] is not factor or self._cached[1] != damping:
            inverse = damped_inverse(curvature, damping, [repr(layer.name) for layer in self.layers])
            self._cached = factor, damping, inverse
        return self._cached[2]

    def _chain(self, tensors: Sequence[Tensor]) -> ChainCurvature:
        """Join pairs S, A of the layers, then of neighbours."""
        products = tuple(KroneckerProduct(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True))
        return ChainCurvature(products[: len(self.layers)], products[len(self.layers) :])

    def _matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Convert tensors in the order of the parameters to one matrix per layer."""
        of_param = dict(zip(self.params, tensors, strict=True))
        return tuple(layer.matrix([of_param[param] for param in layer.params]).detach() for layer in self.layers)

    def _tensors(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Convert one matrix per layer to tensors in the order of the parameters."""
        of_param: dict[nn.Parameter, Tensor] = {}
        for layer, matrix in zip(self.layers, matrices, strict=True):
            of_param.update(zip(layer.params, layer.tensors(matrix), strict=True))
        return [of_param[param] for param in self.params]


def _scaled(products: Sequence[KroneckerProduct], scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(scale * product.left, product.right.clone()) for product in products]
