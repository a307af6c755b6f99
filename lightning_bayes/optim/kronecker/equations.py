"""The equations of a K-FAC method: pure functions from the paper's file, which `kronecker.family` applies to each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct


class LayerEquations(NamedTuple):
    """Pure functions of one layer; see `kronecker.kfac` and `kronecker.noisy_kfac`."""

    state: Callable[[Tensor, Tensor, KroneckerProduct], Any]  # mean, momentum, inverse
    update: Callable[..., Any]  # the step up to its length
    average_factors: Callable[..., KroneckerProduct]
    inverse: Callable[..., KroneckerProduct]  # of the damped factors, for the step
    root: Callable[..., KroneckerProduct] | None = None  # for the noise
    sample: Callable[..., Tensor] | None = None
