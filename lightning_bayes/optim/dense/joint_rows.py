"""Optimizers of joint posteriors whose curvature is made of every example's inputs and output gradients, layer by layer."""

from __future__ import annotations

from abc import ABC
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_bayes.curvature import Capture, Likelihood, LossReduction
from lightning_bayes.curvature.joint import LayerRows, RowsCapture, RowsEngine
from lightning_bayes.curvature.kronecker import Request
from lightning_bayes.optim.dense.joint import JointOptimizer
from lightning_bayes.optim.dense.joint_layers import require_matrix_layers
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.runtime.parameters import trainable


class RowsOptimizer(JointOptimizer, ABC):
    """Base of the family.

    Args:
        model: A model of linear layers and convolutions without groups.
        fisher: ``"sampled"`` draws labels from the likelihood, ``"empirical"`` takes the data's; None draws them where a
            likelihood is known.
        likelihood: Of the model's outputs; None looks for the model's attribute ``likelihood``.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
        **arguments: See `JointOptimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fisher: FisherName | None,
        likelihood: Likelihood | None,
        loss_reduction: LossReduction,
        **arguments: Any,
    ) -> None:
        check_fisher(fisher)
        label_source(fisher, likelihood, model)  # refuses a likelihood that cannot be sampled
        self.fisher, self._likelihood = fisher, likelihood
        self._rows = RowsEngine(model, loss_reduction)
        super().__init__(model, self._rows, trainable(model), **arguments)
        self._layers = require_matrix_layers(model, self.param_groups, type(self).__name__)

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        self._require_unfrozen()
        labels = label_source(self.fisher, self._likelihood, self.model)
        layers = {layer.module: layer.has_bias for layer in self._layers}
        return self._rows.capture(Request(layers, labels, self._label_seed(sample), loss_scale))

    def _layer_rows(self, captured: Any) -> list[LayerRows]:
        """The rows of each layer in a finished pass; zeros where backward did not reach it."""
        assert isinstance(captured, RowsCapture)
        found = captured.rows()
        examples = len(next(iter(found.values())).inputs)
        return [found.get(layer.module) or _no_rows(layer, examples) for layer in self._layers]


def _no_rows(layer: MatrixLayer, examples: int) -> LayerRows:
    _, rows, columns = layer.shape
    return LayerRows(layer.weight.new_zeros(examples, 1, columns), layer.weight.new_zeros(examples, 1, rows))
