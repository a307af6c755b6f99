"""Posterior precision of a layer's matrix, from the parameter group and the optimizer state of its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.readout.shape import layer_shape
from lightning_bayes.posteriors import kronecker_precision


def layer_precision(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> KroneckerProduct | None:
    """L ⊗ R of a layer from its current factors; None without noise. Arguments as in `layer_shape`."""
    if not group["noisy"] or not state["noisy"]:
        return None
    scale, damping = layer_shape(group, state, weight)
    curvature = KroneckerProduct(state["output_factor"], state["input_factor"])
    return kronecker_precision(curvature, scale, damping)
