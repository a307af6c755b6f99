"""The Gaussian posterior with a full precision matrix, for small models: q(θ) = N(θ; μ, P⁻¹), P = L Lᵀ.

A sample is μ + L⁻ᵀ ε. The family of full-covariance VON, VONG (Khan et al. 2018) and NNG-full (Zhang et al. 2018,
eqs. 9-10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.linalg import cholesky, inverse_root
from lightning_bayes.posteriors.base import DEFAULT_LIMIT_MIB, AbstractPosterior, TensorDict, as_rows, require_memory


def check_full_size(params: Mapping[str, Tensor], limit_mib: float = DEFAULT_LIMIT_MIB) -> None:
    """Raise `PosteriorError` if one D × D matrix exceeds the limit; training holds about three of them."""
    size = sum(p.numel() for p in params.values())
    bytes_each = max((p.element_size() for p in params.values()), default=4)
    what = f"The full precision matrix of {size:,} weights, {size:,} × {size:,} numbers,"
    require_memory(what, size**2, bytes_each, limit_mib, "MatrixGaussian or MeanField")


@final
@dataclass(frozen=True, repr=False)
class FullGaussian(AbstractPosterior):
    """A Gaussian posterior over named weights with a full covariance.

    The other fields are documented in `AbstractPosterior`.

    Attributes:
        precision: P = Σ⁻¹, ``[D, D]``, over all weights in the order of `mean`, each flattened row by row.

    Example:
        >>> q = FullGaussian({"w": torch.zeros(2)}, torch.tensor([[2.0, 1.0], [1.0, 2.0]]), {"w": 1.0}, num_data=10)
        >>> q.variance()["w"]
        tensor([0.6667, 0.6667])
    """

    mean: TensorDict
    precision: Tensor
    prior_precision: dict[str, float]
    num_data: float
    constants: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `PosteriorError` if names or shapes do not match."""
        if self.precision.shape != (self._size, self._size):
            raise PosteriorError(
                f"The {self._size} weights {', '.join(self.mean)} need a precision [{self._size}, {self._size}], but it "
                f"is {list(self.precision.shape)}."
            )
        self._require_match("Mean and prior", ())

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + L⁻ᵀ ε."""
        offsets = split_like(self._root @ flattened(noise, self.mean), self.mean)
        return {name: mean + offsets[name] for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """Variances, diag P⁻¹, by parameter name."""
        return split_like(self._root.square().sum(1), self.mean)

    def log_det_precision(self) -> Tensor:
        """Log det P."""
        return -2 * self._root.diagonal().log().sum()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ P (θ-μ)."""
        offset = flattened(weights, self.mean) - flattened(self.mean, self.mean)
        return offset @ self.precision @ offset

    def variance_along(self, directions: TensorDict) -> Tensor:
        """‖L⁻¹ d‖²."""
        joint = torch.cat([as_rows(directions[name]) for name in self.mean], 1)
        return (joint @ self._root).square().sum(1)

    def select(self, prefix: str) -> FullGaussian:
        """The marginal posterior of a submodule; its precision is not a block of P."""
        selected = self._selected_fields(prefix)
        selected["precision"] = self._marginal_precision([name.startswith(prefix) for name in self.mean])
        return FullGaussian(**selected).with_likelihood(self.likelihood)

    @cached_property
    def _root(self) -> Tensor:
        return inverse_root(self.precision, "precision of the full Gaussian")

    def _marginal_precision(self, is_selected: list[bool]) -> Tensor:
        if all(is_selected):
            return self.precision
        sizes = torch.tensor([mean.numel() for mean in self.mean.values()])
        rows = self._root[torch.tensor(is_selected).repeat_interleave(sizes).to(self._root.device)]
        return torch.cholesky_inverse(cholesky(rows @ rows.T, "marginal covariance"))


def flattened(values: TensorDict, like: TensorDict) -> Tensor:
    """The tensors in one vector ``[D]``, in the order of `like`."""
    return torch.cat([values[name].reshape(-1) for name in like])


def split_like(flat: Tensor, like: TensorDict) -> TensorDict:
    """Inverse of `flattened`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}
