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
from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict, cut
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB, require_memory


def check_full_size(params: Mapping[str, Tensor], limit_mib: float = DEFAULT_LIMIT_MIB) -> None:
    """Refuse a model that is too large for a full covariance: a `PosteriorError` says how much memory it would take.

    Args:
        params: Its noisy parameters by name.
        limit_mib: Memory in MiB that one D × D matrix may take; training holds about three.
    """
    size = sum(p.numel() for p in params.values())
    bytes_each = max((p.element_size() for p in params.values()), default=4)
    what = f"The full precision matrix of {size:,} weights, {size:,} × {size:,} numbers,"
    require_memory(what, size**2, bytes_each, limit_mib, "MatrixGaussian or MeanField")


@final
@dataclass(frozen=True, repr=False)
class FullGaussian(AbstractPosterior):
    """A Gaussian posterior over named weights, correlated without restriction.

    Attributes:
        mean: μ by parameter name.
        precision: P = Σ⁻¹, ``[D, D]``, over all weights in the order of `mean`, each flattened row by row.
        prior_precision: δ by parameter name.
        num_data: N, the number of training examples the posterior has seen.
        constants: Parameters without noise and buffers by name: what else a prediction needs.

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
        """Check that the parts fit.

        Raises:
            PosteriorError: If they do not.
        """
        if self.precision.shape != (self._size, self._size):
            raise PosteriorError(
                f"The {self._size} weights {', '.join(self.mean)} need a precision [{self._size}, {self._size}], but it "
                f"is {list(self.precision.shape)}."
            )
        missing = [name for name in self.mean if name not in self.prior_precision]
        if missing:
            raise PosteriorError(f"Mean and prior do not fit for {', '.join(missing)}.")

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + L⁻ᵀ ε; see `AbstractPosterior.transform`."""
        away = self._parts(self._root @ self._joint(noise))
        return {name: mean + away[name] for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """Variances, diag P⁻¹, by parameter name."""
        return self._parts(self._root.square().sum(1))

    def log_det_precision(self) -> Tensor:
        """Log det P."""
        return -2 * self._root.diagonal().log().sum()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ P (θ-μ)."""
        away = self._joint({name: weights[name] - mean for name, mean in self.mean.items()})
        return away @ self.precision @ away

    def variance_along(self, directions: TensorDict) -> Tensor:
        """‖L⁻¹ d‖²; see `AbstractPosterior.variance_along`."""
        joint = torch.cat([directions[name].flatten(1) for name in self.mean], 1)
        return (joint @ self._root).square().sum(1)

    def select(self, prefix: str) -> FullGaussian:
        """The posterior of a submodule: the marginal, whose precision is not a block of P.

        Args:
            prefix: Beginning of its parameters' names, such as ``"model."``.

        Returns:
            The marginal of its weights, without the prefix.
        """
        self._require_selected(prefix)
        return FullGaussian(
            cut(self.mean, prefix),
            self._marginal_precision([name.startswith(prefix) for name in self.mean]),
            cut(self.prior_precision, prefix),
            self.num_data,
            cut(self.constants, prefix),
        )

    @cached_property
    def _root(self) -> Tensor:
        return inverse_root(self.precision, "precision of the full Gaussian")

    def _marginal_precision(self, chosen: list[bool]) -> Tensor:
        if all(chosen):
            return self.precision
        sizes = torch.tensor([mean.numel() for mean in self.mean.values()])
        rows = self._root[torch.tensor(chosen).repeat_interleave(sizes).to(self._root.device)]
        return torch.cholesky_inverse(cholesky(rows @ rows.T, "marginal covariance"))

    def _joint(self, values: TensorDict) -> Tensor:
        return torch.cat([values[name].reshape(-1) for name in self.mean])

    def _parts(self, flat: Tensor) -> TensorDict:
        parts = torch.split(flat, [mean.numel() for mean in self.mean.values()])
        return {name: part.view(mean.shape) for (name, mean), part in zip(self.mean.items(), parts, strict=True)}
