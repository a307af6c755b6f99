"""K-FAC's curvature: measurements of the Kronecker factors of all layers, running averages, and their inversions.

When K-FAC measures and inverts factors: every T_stats and every T_inv updates, with the layers' inversions staggered.

Averages start from a single batch and change fast at first, so they are also inverted after 1, 2, 4, 8, … measurements.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.kronecker import KroneckerCapture
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.covariance.kronecker import layer_product
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores, SquaredGradients
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass
from lightning_bayes.optim.kronecker.layer import KroneckerLayer
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.passes import UpdateMeasurement

_NAMES = ("output_factor", "input_factor")  # of S and A


@final
class KroneckerFactorsEstimator(CurvatureEstimator):
    """Reads S and A, which are averaged separately, by weight and name, and squared gradients by parameter."""

    def __init__(self, quantity: KroneckerQuantity = "kfac", *, samples_labels: bool = False) -> None:
        self.quantity = quantity  # type: ignore[misc]
        self._samples_labels = samples_labels
        self._squares = SquaredGradients()

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        assert isinstance(finished.captured, KroneckerCapture)
        curvature: Curvature = {}
        for layer, measured in finished.captured.results().items():
            assert isinstance(layer.weight, nn.Parameter)
            curvature |= {(layer.weight, name): factor for name, factor in zip(_NAMES, measured.factors, strict=True)}
        return {**curvature, **self._squares.read(finished, params, scores)}

    def degree_of(self, key: Any) -> int:
        """Sampled labels and inputs do not depend on the loss."""
        is_input = isinstance(key, tuple) and key[1] == "input_factor"
        return 0 if self._samples_labels or is_input else 2 if self.quantity == "kfac" else 1


def factor_shapes(layer: MatrixLayer) -> dict[Hashable, Tensor]:
    """Return tensors with the shapes of a layer's factors, by weight and name; expanded zeros, which need no memory."""
    zero = torch.zeros((), dtype=layer.weight.dtype, device=layer.weight.device)
    shapes = zip(_NAMES, layer.factor_shapes, strict=True)
    return {(layer.weight, name): zero.expand(shape) for name, shape in shapes}


def factors_of(layer: MatrixLayer, curvature: Mapping[Hashable, Tensor]) -> KroneckerProduct:
    """Return the measured S ⊗ A of a layer."""
    return KroneckerProduct(*(curvature[layer.weight, name] for name in _NAMES))


def refresh(layers: Sequence[KroneckerLayer], measurement: UpdateMeasurement, *, update: int, interval: int) -> None:
    """Update the factors from a measurement, and invert the layers that are due. If that fails, nothing changes."""
    measures, averages = bool(measurement.curvature), dict[KroneckerLayer, KroneckerProduct]()
    if measures:
        averages = {layer: layer.average_factors(factors_of(layer.matrix, measurement.curvature)) for layer in layers}
    due = [
        layer
        for i, layer in enumerate(layers)
        if (measures and _is_power_of_two(layer.state["measurements"] + 1))
        or is_due(update, interval, offset=i * interval // len(layers))
    ]
    factors = {layer: averages[layer] if measures else layer_product(layer.state, "factor") for layer in due}
    inverted = {layer: layer.invert(product) for layer, product in factors.items()}
    for layer, average in averages.items():
        layer.store_factors(average)
        layer.count_measurement()
    for layer, result in inverted.items():
        layer.store_inverted(result)


def is_due(step: int, interval: int, offset: int = 0) -> bool:
    """Whether an action that repeats every `interval` updates is due, `offset` updates late; always at the first update."""
    return step == 1 or (step - 1 - offset) % interval == 0


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
