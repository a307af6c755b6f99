"""The Gaussian posterior with a block-tridiagonal covariance over a chain of linear layers.

Zhang et al. 2018, section 3.5, after Martens & Grosse 2015, section 4.3. The precision is given by Kronecker-factored
blocks, one for every layer and one for every pair of neighbours; see `linalg.block_tridiagonal` for the equations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import PosteriorError
from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct
from lightning_bayes.posteriors.base import DEFAULT_LIMIT_MIB, AbstractPosterior, TensorDict, require_memory
from lightning_bayes.posteriors.matrix_gaussian import layer_matrix, set_layer
from lightning_bayes.private_torch import own_parameters


@final
@dataclass(frozen=True, repr=False)
class BlockTridiagonal(AbstractPosterior):
    """A Gaussian posterior over a chain of linear layers.

    The other fields are documented in `AbstractPosterior`.

    Attributes:
        factors: (L, R) of each layer's block L ⊗ R of the precision by weight name, in the order of the chain,
            ``[out, out]`` and ``[K, K]``, including scale and damping.
        links: (L, R) of the precision's block between each layer and the next by weight name, ``[out, next out]`` and
            ``[K, next K]``. The last layer has none.
        biases: Name of the bias in the last column of the matrix, by weight name.
    """

    mean: TensorDict
    factors: dict[str, tuple[Tensor, Tensor]]
    links: dict[str, tuple[Tensor, Tensor]]
    biases: dict[str, str]
    prior_precision: dict[str, float]
    num_data: float
    constants: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `PosteriorError` if names or shapes do not match."""
        covered = [*self.factors, *self.biases.values()]
        wrong = [name for name in self.mean if covered.count(name) != 1]
        wrong += [name for name in covered if name not in self.mean]
        if not wrong:  # names match, so shapes can be compared
            wrong = [name for name in self.factors if not self._fits(self.factors, name, name)]
        if not wrong:
            wrong = [name for name, after in pairwise(self.factors) if not self._fits(self.links, name, after)]
        wrong += [name for name in self.links if name not in list(self.factors)[:-1]]
        self._require_match("Mean, factors, links and prior", wrong)

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + T ε."""
        offsets = self._tensors(self._covariance.root(self._matrices(noise)))
        return {name: mean + offsets[name] for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """Variances, diag Σ, by parameter name."""
        return self._tensors(self._covariance.diagonal())

    def log_det_precision(self) -> Tensor:
        """Log det Σ⁻¹."""
        return self._covariance.log_det()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ)."""
        offsets = self._matrices({name: weights[name] - mean for name, mean in self.mean.items()})
        return torch.stack([noise.square().sum() for noise in self._covariance.inverse_root(offsets)]).sum()

    def select(self, prefix: str) -> BlockTridiagonal:
        """The posterior of a submodule that contains the whole chain."""
        selected = self._selected_fields(prefix)
        names = list(self.factors)
        inside = [name for name in names if name.startswith(prefix)]
        if len(inside) < len(names):
            raise PosteriorError(
                f"{prefix!r} selects the layers {', '.join(inside) or 'none'} of the chain {', '.join(names)}, and "
                "their marginal is not block-tridiagonal. Sample from the whole posterior and keep these layers."
            )
        return BlockTridiagonal(**selected).with_likelihood(self.likelihood)

    @cached_property
    def _covariance(self) -> BlockTridiagonalInverse:
        diagonal = [KroneckerProduct(*factors) for factors in self.factors.values()]
        # `links` may be in another order than the chain.
        links = [KroneckerProduct(*self.links[name]) for name in list(self.factors)[:-1]]
        return BlockTridiagonalInverse.of(diagonal, links, list(self.factors))

    def _matrices(self, values: TensorDict) -> list[Tensor]:
        return [
            layer_matrix(values[name], values[self.biases[name]] if name in self.biases else None)
            for name in self.factors
        ]

    def _tensors(self, matrices: list[Tensor]) -> TensorDict:
        values: TensorDict = {}
        for name, matrix in zip(self.factors, matrices, strict=True):
            set_layer(values, matrix, name, self.biases.get(name), self.mean[name].shape)
        return values

    def _fits(self, blocks: dict[str, tuple[Tensor, Tensor]], name: str, after: str) -> bool:
        """Whether the block of two layers, or of a layer and itself, has their shapes."""
        if name not in blocks:
            return False
        (rows, columns), (next_rows, next_columns) = self._block_shape(name), self._block_shape(after)
        left, right = blocks[name]
        return left.shape == (rows, next_rows) and right.shape == (columns, next_columns)

    def _block_shape(self, name: str) -> tuple[int, int]:
        weight = self.mean[name]
        return len(weight), weight[0].numel() + (name in self.biases)


def linear_chain(model: nn.Module, limit_mib: float = DEFAULT_LIMIT_MIB) -> list[str]:
    """The names of a model's linear layers, registered in the order of the forward pass; `limit_mib` bounds the factors."""
    layers = [(name, m) for name, m in model.named_modules() if own_parameters(m)]
    linear = [(name, m) for name, m in layers if type(m) is nn.Linear]
    misfits = [f"{name or 'the model itself'} ({type(m).__name__})" for name, m in layers if type(m) is not nn.Linear]
    misfits += [
        f"{after} ({b.in_features} inputs after the {a.out_features} outputs of {before})"
        for (before, a), (after, b) in pairwise(linear)
        if a.out_features != b.in_features
    ]
    if misfits or not linear:
        raise PosteriorError(
            f"A block-tridiagonal posterior needs a chain of nn.Linear layers, but {type(model).__name__} has "
            f"{', '.join(misfits) or 'none'}. Use MatrixGaussian instead."
        )
    _require_chain_memory(linear, limit_mib)
    return [name for name, _ in linear]


def _require_chain_memory(linear: list[tuple[str, nn.Linear]], limit_mib: float) -> None:
    sides = [(m.out_features, m.in_features + (m.bias is not None)) for _, m in linear]
    layers = sum(rows**2 + columns**2 for rows, columns in sides)
    pairs = sum(a[0] * b[0] + a[1] * b[1] for a, b in pairwise(sides))
    what = f"The factors of {len(sides)} linear layers and of the pairs of neighbours"
    bytes_each = linear[0][1].weight.element_size()
    require_memory(what, layers + pairs, bytes_each, limit_mib, "MeanField or smaller layers")
