"""The curvature of K-FAC: S and A of the layers that have them, and squared gradients of all other parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, final

from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.kronecker import KroneckerCapture
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores, SquaredGradients
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass

_NAMES: Final = ("output_factor", "input_factor")  # of S and A


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
            curvature |= by_name(layer.weight, measured.factors)
        return {**curvature, **self._squares.read(finished, params, scores)}

    def degree_of(self, key: Any) -> int:
        """Sampled labels and inputs do not depend on the loss."""
        is_input = isinstance(key, tuple) and key[1] == "input_factor"
        return 0 if self._samples_labels or is_input else 2 if self.quantity == "kfac" else 1


def by_name(weight: Any, factors: Sequence[Tensor]) -> dict[Hashable, Tensor]:
    """S and A of a layer by its weight and their names."""
    return {(weight, name): factor for name, factor in zip(_NAMES, factors, strict=True)}


def measured_factors(weight: nn.Parameter, curvature: Mapping[Hashable, Tensor]) -> KroneckerProduct:
    """S ⊗ A of a layer; the inverse of `by_name`."""
    return KroneckerProduct(*(curvature[weight, name] for name in _NAMES))


def is_due(step: int, interval: int, offset: int = 0) -> bool:
    """Whether an action that repeats every `interval` updates is due, `offset` updates late; always at the first update."""
    return step == 1 or (step - 1 - offset) % interval == 0
