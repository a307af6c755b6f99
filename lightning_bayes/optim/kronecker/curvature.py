"""K-FAC's curvature: measurements of the Kronecker factors of all layers, running averages, and their inversions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.kronecker import KroneckerCapture
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker import equations, layer_state
from lightning_bayes.optim.kronecker.distributed_inversion import WorkerGroup, invert_all
from lightning_bayes.optim.kronecker.intervals import layers_due
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.readout.layer import layer_damping
from lightning_bayes.optim.runtime.measuring import weight_of_old
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass, Measurement

if TYPE_CHECKING:
    from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer


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
        for layer, measured in finished.captured.results().items():
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


@final
class KroneckerCurvature:
    """Maintains the factors, inverses and roots in the optimizer's state.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: MeanFieldOptimizer) -> None:
        self._optimizer = optimizer

    def start(self, layers: Sequence[MatrixLayer]) -> None:
        """Initialise and invert the factors of noisy layers that have none, if their group has an ``init_precision``."""
        for layer in layers:
            precision = layer.group["init_precision"]
            state = self._optimizer.state[layer.weight]
            is_new = not layer_state.has_product(state, "factor")
            if is_new and layer_state.is_noisy(state, layer) and precision is not None:
                factors = layer_state.factors_at_precision(layer, precision, effective(layer.group))
                inverted = self.invert(layer, factors)
                self._store_factors(layer, factors)
                state.update(inverted)

    def refresh(
        self,
        layers: Sequence[MatrixLayer],
        measurement: Measurement,
        inverse_interval: int,
        workers: WorkerGroup | None,
    ) -> None:
        """Update the factors from a measurement, and invert the layers that are due. If that fails, nothing changes.

        Args:
            layers: All layers with factors.
            measurement: The measurement.
            inverse_interval: T_inv.
            workers: Processes that share the inversions; None inverts all layers in this process.
        """
        states, measures = self._optimizer.state, bool(measurement.curvature)
        averages = {layer: self.average_factors(layer, measurement) for layer in layers} if measures else {}
        counts = [states[layer.weight]["measurements"] + measures for layer in layers]
        update = self._optimizer.num_updates + 1
        due = [layers[i] for i in layers_due(counts, update, inverse_interval, measures=measures)]
        kinds_of = {layer: kinds for layer in due if (kinds := self._inverted_kinds(layer))}
        factors = {layer: averages[layer] if measures else self._factors(layer) for layer in kinds_of}
        like = {layer: layer_state.entries(factors[layer], *kinds) for layer, kinds in kinds_of.items()}
        inverted = invert_all(like, lambda layer: self.invert(layer, factors[layer]), workers)
        for layer, average in averages.items():
            self._store_factors(layer, average)
            count = states[layer.weight]["measurements"] + 1
            for param in layer.params:
                states[param]["measurements"] = count
        for layer, result in inverted.items():
            states[layer.weight].update(result)

    def average_factors(self, layer: MatrixLayer, measurement: Measurement) -> KroneckerProduct:
        """The running averages of a layer's factors, including a measurement."""
        state, measured = self._optimizer.state[layer.weight], factors_of(layer, measurement.curvature)
        if not layer_state.has_product(state, "factor"):
            return measured  # the first measurement starts the average
        starts_as_mean = not self._optimizer.step_of(layer.group).is_published
        beta = weight_of_old(layer.group["betas"][1], state["measurements"] + 1, 1, starts_as_mean=starts_as_mean)
        return equations.average_factors(self._factors(layer), measured, beta=beta)

    def _inverted_kinds(self, layer: MatrixLayer) -> list[str]:
        """The products that inverting a layer yields: ``"inverse"`` for the step, ``"root"`` for the noise."""
        state = self._optimizer.state[layer.weight]
        is_needed = {"inverse": self._optimizer.base_step is None, "root": layer_state.is_noisy(state, layer)}
        return [kind for kind, needed in is_needed.items() if needed]

    def invert(self, layer: MatrixLayer, factors: KroneckerProduct) -> dict[str, Tensor]:
        """Invert a layer's factors; raises `NotPositiveDefiniteError` if that fails.

        Args:
            layer: The layer.
            factors: Its S ⊗ A.

        Returns:
            The entries of the layer's state for the step and the noise.
        """
        hyper, inverted = effective(layer.group), dict[str, Tensor]()
        kinds = self._inverted_kinds(layer)
        if "inverse" in kinds:
            inverse = equations.damped_inverse(factors, prior=hyper.prior, damping=hyper.damping, name=layer.name)
            inverted |= layer_state.entries(inverse, "inverse")
        if "root" in kinds:
            damping = layer_damping(factors, hyper)  # includes the prior
            root = equations.noise_root(factors, prior=0.0, damping=damping, name=layer.name)
            inverted |= layer_state.entries(root, "root")
        return inverted

    def _factors(self, layer: MatrixLayer) -> KroneckerProduct:
        return layer_state.product(self._optimizer.state[layer.weight], "factor")

    def _store_factors(self, layer: MatrixLayer, factors: KroneckerProduct) -> None:
        """Store S and A, and drop the squared gradients that the parameters had before they were part of a matrix."""
        self._optimizer.state[layer.weight].update(layer_state.entries(factors, "factor"))
        for param in layer.params:
            self._optimizer.state[param].pop("curvature", None)
