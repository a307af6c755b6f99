"""Block-tridiagonal Noisy K-FAC as an optimizer, around the pure step of `optim.dense.block_tridiagonal`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Likelihood, LossReduction
from lightning_bayes.curvature.joint import LayerRows
from lightning_bayes.errors import PosteriorError, ShapeError
from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.dense import block_tridiagonal as chain
from lightning_bayes.optim.dense.block_tridiagonal import ChainCurvature, ChainState
from lightning_bayes.optim.dense.joint_rows import RowsOptimizer
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.runtime.passes import FinishedPass, Measurement
from lightning_bayes.posteriors import BlockTridiagonal, initial_curvature, linear_chain
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB


@final
class BlockTridiagonalKFAC(RowsOptimizer):
    """Noisy K-FAC with correlated neighbouring layers (Zhang et al. 2018, section 3.5), as a `torch.optim.Optimizer`.

    Factors are measured, averaged and inverted at every update.

    Args:
        model: A chain of linear layers with element-wise activations in between, all of them trainable.
        fisher: ``"sampled"`` draws labels from the likelihood, ``"empirical"`` takes the data's; None draws them where a
            likelihood is known.
        likelihood: Of the model's outputs; None looks for the model's attribute ``likelihood``.
        kl_clip: c of `optim.kronecker.kl_clip`, None for none.
        limit_mib: Memory in MiB that the factors may take.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
        **arguments: See `JointOptimizer`.

    Example:
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
        likelihood: Likelihood | None = None,
        kl_clip: float | None = None,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        loss_reduction: LossReduction = "auto",
        **arguments: Any,
    ) -> None:
        linear_chain(model, limit_mib)
        self.kl_clip = kl_clip
        self._last: tuple[Tensor, float, BlockTridiagonalInverse] | None = None
        super().__init__(model, fisher=fisher, likelihood=likelihood, loss_reduction=loss_reduction, **arguments)

    def _moments(self, finished: FinishedPass) -> list[Tensor]:
        """S and A of every layer, then of every pair of neighbours."""
        rows = self._layer_rows(finished.captured)
        crowded = [layer.name for layer, seen in zip(self._layers, rows, strict=True) if seen.inputs.shape[1] > 1]
        if crowded:
            raise ShapeError(
                f"The curvature between two layers needs one position for each example, but {', '.join(crowded)} saw "
                "several, or was called several times. Use NoisyKFAC for such layers."
            )
        pairs = [*zip(rows, rows, strict=True), *pairwise(rows)]
        return [factor for pair in pairs for factor in _factors(*pair)]

    # -- the state: factors under the layer's weight, links under the earlier layer's --

    def _has_curvature(self) -> bool:
        if "output_factor" not in self.state[self._layers[0].weight] and self._group["init_precision"] is not None:
            self._put(self._start())
        return "output_factor" in self.state[self._layers[0].weight]

    def _start(self) -> ChainCurvature:
        """Multiples c I with (Ñ/τ)(c + √(δ̃+γ))² = ``init_precision``, as π-damping makes it, and nothing between layers."""
        now = self._effective()
        start = initial_curvature(self._group["init_precision"], **now.precision_arguments)
        least = now.prior + now.noise_damping
        size = (start + least) ** 0.5 - least**0.5
        like = self._layers[0].weight
        blocks = [
            KroneckerProduct(*(size * torch.eye(side).to(like) for side in layer.shape[1:])) for layer in self._layers
        ]
        links = [
            KroneckerProduct(*(torch.zeros(len(a), len(b)).to(like) for a, b in zip(before, after, strict=True)))
            for before, after in pairwise(blocks)
        ]
        return ChainCurvature(tuple(blocks), tuple(links))

    def _put(self, curvature: ChainCurvature) -> None:
        for kind, products in zip(("factor", "link"), curvature, strict=True):
            for layer, product in zip(self._layers, products, strict=False):  # one link less than layers
                state = self.state[layer.weight]
                state[f"output_{kind}"], state[f"input_{kind}"] = product

    def _curvature(self) -> ChainCurvature:
        states = [self.state[layer.weight] for layer in self._layers]
        blocks = [KroneckerProduct(state["output_factor"], state["input_factor"]) for state in states]
        links = [KroneckerProduct(state["output_link"], state["input_link"]) for state in states[:-1]]
        return ChainCurvature(tuple(blocks), tuple(links))

    def _names(self) -> list[str]:
        return [repr(layer.name) for layer in self._layers]

    def _matrices(self, values: dict[nn.Parameter, Tensor]) -> list[Tensor]:
        return [layer.matrix([values[param] for param in layer.params]).detach() for layer in self._layers]

    def _in_order(self, matrices: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
        of_param = {
            param: part
            for layer, matrix in zip(self._layers, matrices, strict=True)
            for param, part in zip(layer.params, layer.tensors(matrix), strict=True)
        }
        return [of_param[param] for param in self._params]

    # -- noise, step and posterior --

    def _draw(self, noise: list[Tensor]) -> list[Tensor]:
        now, curvature = self._effective(), self._curvature()
        covariance = self._inverse(curvature, now.prior + now.noise_damping)
        means = self._matrices({param: param for param in self._params})
        state = self._chain_state(means, means, curvature, covariance)  # momenta do not enter
        matrices = self._matrices(dict(zip(self._params, noise, strict=True)))
        return self._in_order(chain.sample(state, matrices, num_data=now.num_data, kl_weight=now.kl_weight))

    def _update_all(self, measurement: Measurement) -> None:
        now = self._effective()
        measured = self._measured_curvature(measurement)
        if not self._has_curvature():
            self._put(measured)
        means = self._matrices({param: param for param in self._params})
        momenta = self._matrices({param: self._momentum(param) for param in self._params})
        grads = self._matrices({param: param.grad for param in self._params if param.grad is not None})
        old = self._chain_state(means, momenta, self._curvature(), None)
        curvature = chain.average_curvature(old, measured, beta=self._group["betas"][1]).curvature
        inverse = self._inverse(curvature, now.prior + now.damping)
        new = chain.update(
            self._chain_state(means, momenta, curvature, inverse),
            grads,
            lr=self._group["lr"],
            beta=self._group["betas"][0],
            prior=now.prior,
            step=self._group["step"] + 1,
            kl_clip=self.kl_clip,
        )
        self._put(curvature)
        self._move_to(self._in_order(new.means), self._in_order(new.momenta))

    def _inverse(self, curvature: ChainCurvature, damping: float) -> BlockTridiagonalInverse:
        """F̂⁻¹; the last one is kept, for several passes, and for a noise with the damping of the step."""
        if self._last is None or self._last[0] is not curvature.blocks[0].left or self._last[1] != damping:
            found = chain.damped_inverse(curvature, damping, self._names())
            self._last = curvature.blocks[0].left, damping, found
        return self._last[2]

    @staticmethod
    def _chain_state(
        means: list[Tensor], momenta: list[Tensor], curvature: ChainCurvature, inverse: BlockTridiagonalInverse | None
    ) -> ChainState:
        known = BlockTridiagonalInverse((), ()) if inverse is None else inverse
        return ChainState(tuple(means), tuple(momenta), curvature, known, known)

    def _measured_curvature(self, measurement: Measurement) -> ChainCurvature:
        factors = list(measurement.curvature.values())
        products = [KroneckerProduct(*pair) for pair in zip(factors[::2], factors[1::2], strict=True)]
        return ChainCurvature(tuple(products[: len(self._layers)]), tuple(products[len(self._layers) :]))

    @torch.no_grad()
    def posterior(self) -> BlockTridiagonal:
        """The posterior by the model's parameter names.

        Returns:
            Copies of mean and factors; buffers are among the constants.

        Raises:
            PosteriorError: If nothing was measured yet.
        """
        if not self._has_curvature():
            raise PosteriorError(f"{type(self).__name__} has no posterior before its first update, or init_precision.")
        now, curvature = self._effective(), self._curvature()
        scale, shift = now.scale, now.prior + now.noise_damping
        names = {param: name for name, param in self.model.named_parameters()}
        blocks = [pi_damped(block, shift) for block in curvature.blocks]
        return BlockTridiagonal(
            {names[param]: param.detach().clone() for param in self._params},
            _scaled(self._layers, blocks, scale, names),
            _scaled(self._layers[:-1], curvature.links, scale, names),
            {names[layer.weight]: names[layer.params[1]] for layer in self._layers if layer.has_bias},
            {names[param]: self._group["prior_precision"] for param in self._params},
            self._group["num_data"],
            self._constants(),
        )


def _factors(before: LayerRows, after: LayerRows) -> tuple[Tensor, Tensor]:
    """(1/B) Σ δ δ'ᵀ and (1/B) Σ ā ā'ᵀ of two layers, or of a layer and itself; see `curvature.factors.link_factors`."""
    count = len(before.inputs)
    inputs, gradients = (
        [rows.flatten(0, 1) for rows in pair]
        for pair in zip(*((r.inputs, r.gradients) for r in (before, after)), strict=True)
    )
    return gradients[0].mT @ gradients[1] / count, inputs[0].mT @ inputs[1] / count


def _scaled(
    layers: list[MatrixLayer],
    products: list[KroneckerProduct] | tuple[KroneckerProduct, ...],
    scale: float,
    names: dict[nn.Parameter, str],
) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        names[layer.weight]: (scale * product.left, product.right.clone())
        for layer, product in zip(layers, products, strict=True)
    }
