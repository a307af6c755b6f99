"""K-FAC's curvature measurements: Kronecker factors of matrix layers, squared gradients of all other parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.kronecker import KroneckerCapture
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass

_NAMES = ("output_factor", "input_factor")  # of S and A


@final
class KroneckerFactorsEstimator(CurvatureEstimator):
    """Reads S and A, which are averaged separately, by weight and name, and squared gradients by parameter.

    Args:
        quantity: ``"kfac"``, ``"kflr"`` or ``"kfra"``.
    """

    def __init__(self, quantity: KroneckerQuantity = "kfac") -> None:
        self.quantity = quantity  # type: ignore[misc]

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        assert isinstance(finished.captured, KroneckerCapture)
        curvature: Curvature = {}
        for layer, measured in finished.captured.mean_factors().items():
            assert isinstance(layer.weight, nn.Parameter)
            curvature |= {(layer.weight, name): factor for name, factor in zip(_NAMES, measured.factors, strict=True)}
        return {**curvature, **finished.squares()}


def factor_shapes(layer: MatrixLayer) -> dict[Hashable, Tensor]:
    """Return tensors with the shapes of a layer's factors, by weight and name; expanded zeros, which need no memory."""
    zero = torch.zeros((), dtype=layer.weight.dtype, device=layer.weight.device)
    shapes = zip(_NAMES, layer.factor_shapes, strict=True)
    return {(layer.weight, name): zero.expand(shape) for name, shape in shapes}


def factors_of(layer: MatrixLayer, curvature: Mapping[Hashable, Tensor]) -> KroneckerProduct:
    """Return the measured S ⊗ A of a layer."""
    return KroneckerProduct(*(curvature[layer.weight, name] for name in _NAMES))
