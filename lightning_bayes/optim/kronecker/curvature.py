"""Running averages of the Kronecker factors of all layers, and the inversions that steps and noise need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.kronecker import layer_state
from lightning_bayes.optim.kronecker.distributed_inversion import WorkerGroup, invert_all
from lightning_bayes.optim.kronecker.equations import LayerEquations
from lightning_bayes.optim.kronecker.estimator import factors_of
from lightning_bayes.optim.kronecker.intervals import layers_due
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.readout.shape import layer_damping
from lightning_bayes.optim.runtime.passes import Measurement

if TYPE_CHECKING:
    from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer


@final
class KroneckerCurvature:
    """Maintains the factors, inverses and roots in the optimizer's state.

    Args:
        optimizer: The optimizer.
        equations: The equations of the method.
    """

    def __init__(self, optimizer: MeanFieldOptimizer, equations: LayerEquations) -> None:
        self._optimizer, self._equations = optimizer, equations

    def start(self, layers: Sequence[MatrixLayer]) -> None:
        """Initialise and invert the factors of noisy layers that have none, if their group has an ``init_precision``."""
        for layer in layers:
            state = self._optimizer.state[layer.weight]
            is_new = not layer_state.has_product(state, "factor")
            if is_new and self.is_noisy(layer) and layer.group["init_precision"] is not None:
                layer_state.start_at_precision(state, layer)
                self.invert(layer)
                self._drop_squared_gradients(layer)

    def refresh(
        self,
        layers: Sequence[MatrixLayer],
        measurement: Measurement,
        inverse_interval: int,
        workers: WorkerGroup | None,
    ) -> None:
        """Update the factors from a measurement, and invert the layers that are due.

        Args:
            layers: All layers with factors.
            measurement: The measurement.
            inverse_interval: T_inv.
            workers: Processes that share the inversions; None inverts all layers in this process.
        """
        states = self._optimizer.state
        if measurement.has_curvature:
            for layer in layers:
                self.average_factors(layer, measurement)
        counts = [states[layer.weight]["measurements"] for layer in layers]
        update = self._optimizer.num_updates + 1
        due = [layers[i] for i in layers_due(counts, update, inverse_interval, measures=measurement.has_curvature)]
        kinds_of = {layer: kinds for layer in due if (kinds := self._inverted_kinds(layer))}
        invert_all(kinds_of, states, self.invert, workers)

    def average_factors(self, layer: MatrixLayer, measurement: Measurement) -> None:
        """Update the running averages of a layer's factors."""
        state, measured = self._optimizer.state[layer.weight], factors_of(layer, measurement.curvature)
        average = measured  # the first measurement starts the average
        if layer_state.has_product(state, "factor"):
            old, beta = layer_state.product(state, "factor"), self.weight_of_old(state, layer.group)
            average = self._equations.average_factors(old, measured, beta=beta)
        layer_state.put(state, "factor", average)
        count = state["measurements"] + 1
        for param in layer.params:
            self._optimizer.state[param]["measurements"] = count
        self._drop_squared_gradients(layer)

    def weight_of_old(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
        """β₂ of the next measurement."""
        beta: float = group["betas"][1]
        return self._optimizer.step_of(group).weight_of_old(beta, state["measurements"] + 1)

    def _inverted_kinds(self, layer: MatrixLayer) -> list[str]:
        """The products that inverting a layer yields: ``"inverse"`` for the step, ``"root"`` for the noise."""
        is_needed = {"inverse": self._optimizer.base_step is None, "root": self.is_noisy(layer)}
        return [kind for kind, needed in is_needed.items() if needed]

    def is_noisy(self, layer: MatrixLayer) -> bool:
        """Whether the layer is sampled."""
        return bool(layer.group["noisy"] and self._optimizer.state[layer.weight]["noisy"])

    def invert(self, layer: MatrixLayer) -> None:
        """Invert a layer's factors; raises `NotPositiveDefiniteError` if that fails."""
        state, hyper = self._optimizer.state[layer.weight], effective(layer.group)
        curvature = layer_state.product(state, "factor")
        for kind in self._inverted_kinds(layer):
            if kind == "inverse":
                inverted = self._equations.inverse(curvature, prior=hyper.prior, damping=hyper.damping, name=layer.name)
            else:
                assert self._equations.root is not None
                damping = layer_damping(curvature, hyper)  # includes the prior
                inverted = self._equations.root(curvature, prior=0.0, damping=damping, name=layer.name)
            layer_state.put(state, kind, inverted)

    def _drop_squared_gradients(self, layer: MatrixLayer) -> None:
        """Drop the squared gradients that the layer's parameters had before they were part of a matrix."""
        for param in layer.params:
            self._optimizer.state[param].pop("curvature", None)
