"""Curvature measured during a backward pass: per-example gradients by layer rules, with two engines.

Dimension 0 of a layer's input holds the examples of the batch. Most violations raise an error that names the layer. Two
cases show neither in shapes nor in the graph and go unnoticed:

- A module without a rule stores a tensor that the loss uses in addition to its output, as in ``self.kl = ...``. The gradient
  through that tensor is lost.
- The examples pass through the layers one at a time and their losses are added by hand. They count as one example.

Rules allocate at most ``workspace_mib`` MiB (default `DEFAULT_MIB`) for per-example values at a time. The limit does not
cover the unfolded outputs of transposed convolutions and weights that several calls of one pass share.

Only this package imports BackPACK.
"""

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine, EngineName, GradientCapture, GradientEngine
from lightning_bayes.curvature.loss import LossReduction, with_per_example_loss
from lightning_bayes.curvature.measure import check_names, make_engine, measure
from lightning_bayes.curvature.measurement import KroneckerFactors, Measurement, Quantity
from lightning_bayes.curvature.parameters import rows_without_gradient
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace

__all__ = [
    "DEFAULT_MIB",
    "AbstractEngine",
    "Capture",
    "EngineName",
    "GradientCapture",
    "GradientEngine",
    "KroneckerFactors",
    "LossReduction",
    "Measurement",
    "Quantity",
    "Workspace",
    "check_names",
    "make_engine",
    "measure",
    "rows_without_gradient",
    "with_per_example_loss",
]
