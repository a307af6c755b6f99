"""The block-tridiagonal family in an optimizer: layers' matrices between its state and `optim.dense.block_tridiagonal`.

The state of each layer's weight has ``output_factor`` and ``input_factor``, the layer's own S and A, and, except in the last
layer, ``output_link`` and ``input_link``, those of the pair that it forms with the next layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, ChainState, damped_inverse, sample, update
from lightning_bayes.optim.dense.joint_optimizer import JointFamily, Moved, States
from lightning_bayes.optim.hyperparameters import Hyperparameters
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.posteriors import BlockTridiagonal, initial_curvature


@final
class ChainCovariance(JointFamily[ChainCurvature, BlockTridiagonal]):
    """Kronecker-factored blocks of every layer and of every pair of neighbours.

    Args:
        params: The parameters.
        layers: The layers in the order of the chain.
        kl_clip: c of `optim.kronecker.kl_clip`, None for none.
    """

    def __init__(self, params: Sequence[nn.Parameter], layers: list[MatrixLayer], kl_clip: float | None) -> None:
        self.params, self.layers, self.kl_clip = list(params), layers, kl_clip
        self._last: tuple[Tensor, float, BlockTridiagonalInverse] | None = None

    def kept(self, states: States) -> ChainCurvature | None:
        """Blocks and links; see `JointFamily.kept`."""
        every = [states[layer.weight] for layer in self.layers]
        if "output_factor" not in every[0]:
            return None
        blocks = [KroneckerProduct(state["output_factor"], state["input_factor"]) for state in every]
        links = [KroneckerProduct(state["output_link"], state["input_link"]) for state in every[:-1]]
        return ChainCurvature(tuple(blocks), tuple(links))

    def keep(self, states: States, curvature: ChainCurvature) -> None:
        """Write blocks and links; see `JointFamily.keep`."""
        for kind, products in zip(("factor", "link"), curvature, strict=True):
            for layer, product in zip(self.layers, products, strict=False):  # one link fewer than layers
                state = states[layer.weight]
                state[f"output_{kind}"], state[f"input_{kind}"] = product

    def start(self, hyper: Hyperparameters) -> ChainCurvature:
        """Multiples c I with (Ñ/τ)(c + √(δ̃+γ))² = ``init_precision``, as π-damping makes it, and nothing between layers."""
        now = hyper.effective()
        start = initial_curvature(hyper.init_precision or 0.0, **now.start_arguments)
        least = now.prior + now.noise_damping
        size = (start + least) ** 0.5 - least**0.5
        like = self.layers[0].weight
        blocks = [
            KroneckerProduct(*(size * torch.eye(side).to(like) for side in layer.shape[1:])) for layer in self.layers
        ]
        links = [
            KroneckerProduct(*(torch.zeros(len(a), len(b)).to(like) for a, b in zip(before, after, strict=True)))
            for before, after in pairwise(blocks)
        ]
        return ChainCurvature(tuple(blocks), tuple(links))

    def measured(self, tensors: list[Tensor]) -> ChainCurvature:
        """Pairs S, A of layers, then of neighbours; see `JointFamily.measured`."""
        products = [KroneckerProduct(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        return ChainCurvature(tuple(products[: len(self.layers)]), tuple(products[len(self.layers) :]))

    def sample(self, curvature: ChainCurvature, noise: list[Tensor], hyper: Hyperparameters) -> list[Tensor]:
        """Draw weights; see `JointFamily.sample`."""
        now = hyper.effective()
        covariance = self._invert(curvature, now.prior + now.noise_damping)
        drawn = sample(
            self._matrices(self.params),
            covariance,
            self._matrices(noise),
            num_data=now.num_data,
            kl_weight=now.kl_weight,
        )
        return self._tensors(drawn)

    def update(
        self,
        old: ChainCurvature,
        measured: ChainCurvature,
        momenta: list[Tensor],
        grads: list[Tensor],
        hyper: Hyperparameters,
    ) -> Moved[ChainCurvature]:
        """Call `block_tridiagonal.update`; see `JointFamily.update`."""
        now = hyper.effective()
        new = update(
            ChainState(tuple(self._matrices(self.params)), tuple(self._matrices(momenta)), old),
            self._matrices(grads),
            measured,
            lr=hyper.lr,
            betas=hyper.betas,
            prior=now.prior,
            damping=now.damping,
            step=hyper.step + 1,
            kl_clip=self.kl_clip,
            invert=self._invert,
        )
        return Moved(self._tensors(new.means), self._tensors(new.momenta), new.curvature)

    def posterior(
        self,
        curvature: ChainCurvature,
        names: dict[nn.Parameter, str],
        shared: dict[str, Any],
        hyper: Hyperparameters,
    ) -> BlockTridiagonal:
        """Damped blocks, and links, times Ñ/τ; see `JointFamily.posterior`."""
        now = hyper.effective()
        blocks = [pi_damped(block, now.prior + now.noise_damping) for block in curvature.blocks]
        weights = [names[layer.weight] for layer in self.layers]
        return BlockTridiagonal(
            factors=dict(zip(weights, _scaled(blocks, now.scale), strict=True)),
            links=dict(zip(weights[:-1], _scaled(curvature.links, now.scale), strict=True)),
            biases={names[layer.weight]: names[layer.params[1]] for layer in self.layers if layer.has_bias},
            **shared,
        )

    def _invert(self, curvature: ChainCurvature, damping: float) -> BlockTridiagonalInverse:
        """F̂⁻¹; the last one is remembered, for several passes, and for a noise with the damping of the step."""
        if self._last is None or self._last[0] is not curvature.blocks[0].left or self._last[1] != damping:
            found = damped_inverse(curvature, damping, [repr(layer.name) for layer in self.layers])
            self._last = curvature.blocks[0].left, damping, found
        return self._last[2]

    def _matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each layer's matrix, from tensors in the parameters' order."""
        of_param = dict(zip(self.params, tensors, strict=True))
        return [layer.matrix([of_param[param] for param in layer.params]).detach() for layer in self.layers]

    def _tensors(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of `_matrices`."""
        of_param = {
            param: part
            for layer, matrix in zip(self.layers, matrices, strict=True)
            for param, part in zip(layer.params, layer.tensors(matrix), strict=True)
        }
        return [of_param[param] for param in self.params]


def _scaled(products: Sequence[KroneckerProduct], scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(scale * product.left, product.right.clone()) for product in products]
