"""Equations of the block-tridiagonal covariance, on an optimizer's tensors.

`optim.dense.block_tridiagonal` has them on matrices.

The state of each layer's weight contains the layer's S and A as ``output_factor`` and ``input_factor``. Except in the last
layer, it also contains S and A between this layer and the next as ``output_link`` and ``input_link``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, ChainState, damped_inverse, sample, update
from lightning_bayes.optim.dense.joint_optimizer import JointEquations, JointUpdate, States
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.posteriors import BlockTridiagonal, initial_curvature


@final
class ChainCovariance(JointEquations[ChainCurvature, BlockTridiagonal]):
    """Kronecker-factored blocks of each layer and of each pair of neighbouring layers.

    Args:
        params: The parameters.
        layers: The layers in the order of the chain.
        kl_clip: Bound c of `optim.kronecker.kl_clip`; None for no bound.
    """

    def __init__(self, params: Sequence[nn.Parameter], layers: list[MatrixLayer], kl_clip: float | None) -> None:
        self.params, self.layers, self.kl_clip = list(params), layers, kl_clip
        self._cached: tuple[Tensor, float, BlockTridiagonalInverse] | None = None  # for this factor and damping

    def load(self, states: States) -> ChainCurvature | None:
        """Read blocks and links; see `JointEquations.load`."""
        layer_states = [states[layer.weight] for layer in self.layers]
        if "output_factor" not in layer_states[0]:
            return None
        blocks = [KroneckerProduct(state["output_factor"], state["input_factor"]) for state in layer_states]
        links = [KroneckerProduct(state["output_link"], state["input_link"]) for state in layer_states[:-1]]
        return ChainCurvature(tuple(blocks), tuple(links))

    def store(self, states: States, curvature: ChainCurvature) -> None:
        """Write blocks and links; see `JointEquations.store`."""
        for kind, products in zip(("factor", "link"), curvature, strict=True):
            for layer, product in zip(self.layers, products, strict=False):  # one link fewer than layers
                state = states[layer.weight]
                state[f"output_{kind}"], state[f"input_{kind}"] = product

    def initial(self, init_precision: float, effective: Effective) -> ChainCurvature:
        """Return blocks c I with (Ñ/τ)(c + √(δ̃+γ))² = `init_precision`, as π-damping requires, and zero links."""
        start = initial_curvature(init_precision, **effective.start_arguments)
        damping = effective.prior + effective.noise_damping
        c = (start + damping) ** 0.5 - damping**0.5
        like = self.layers[0].weight
        blocks = [
            KroneckerProduct(*(c * torch.eye(side).to(like) for side in layer.shape[1:])) for layer in self.layers
        ]
        links = [
            KroneckerProduct(*(torch.zeros(len(a), len(b)).to(like) for a, b in zip(before, after, strict=True)))
            for before, after in pairwise(blocks)
        ]
        return ChainCurvature(tuple(blocks), tuple(links))

    def build_curvature(self, tensors: list[Tensor]) -> ChainCurvature:
        """Join pairs S, A of layers, then of neighbours; see `JointEquations.build_curvature`."""
        products = [KroneckerProduct(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        return ChainCurvature(tuple(products[: len(self.layers)]), tuple(products[len(self.layers) :]))

    def sample(self, curvature: ChainCurvature, noise: list[Tensor], effective: Effective) -> list[Tensor]:
        """Draw weights; see `JointEquations.sample`."""
        weights = sample(
            self._matrices(self.params),
            self._invert(curvature, effective.prior + effective.noise_damping),
            self._matrices(noise),
            num_data=effective.num_data,
            kl_weight=effective.kl_weight,
        )
        return self._tensors(weights)

    def update(
        self,
        old: ChainCurvature,
        measured: ChainCurvature,
        momenta: list[Tensor],
        grads: list[Tensor],
        **arguments: Any,
    ) -> JointUpdate[ChainCurvature]:
        """Call `block_tridiagonal.update`; see `JointEquations.update`."""
        new = update(
            ChainState(tuple(self._matrices(self.params)), tuple(self._matrices(momenta)), old),
            self._matrices(grads),
            measured,
            kl_clip=self.kl_clip,
            invert=self._invert,
            **arguments,
        )
        return JointUpdate(self._tensors(new.means), self._tensors(new.momenta), new.curvature)

    def posterior(
        self, curvature: ChainCurvature, names: dict[nn.Parameter, str], shared: dict[str, Any], effective: Effective
    ) -> BlockTridiagonal:
        """Damped blocks, and links, times Ñ/τ; see `JointEquations.posterior`."""
        blocks = [pi_damped(block, effective.prior + effective.noise_damping) for block in curvature.blocks]
        weights = [names[layer.weight] for layer in self.layers]
        return BlockTridiagonal(
            factors=dict(zip(weights, _scaled(blocks, effective.scale), strict=True)),
            links=dict(zip(weights[:-1], _scaled(curvature.links, effective.scale), strict=True)),
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

    def _matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert tensors in the order of the parameters to one matrix per layer."""
        of_param = dict(zip(self.params, tensors, strict=True))
        return [layer.matrix([of_param[param] for param in layer.params]).detach() for layer in self.layers]

    def _tensors(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Convert one matrix per layer to tensors in the order of the parameters."""
        of_param = {
            param: part
            for layer, matrix in zip(self.layers, matrices, strict=True)
            for param, part in zip(layer.params, layer.tensors(matrix), strict=True)
        }
        return [of_param[param] for param in self.params]


def _scaled(products: Sequence[KroneckerProduct], scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(scale * product.left, product.right.clone()) for product in products]
