"""Measurements in a backward pass: per-example gradients by layer rules, under two engines.

Examples lie in the first dimension of what layers take. Most of what breaks this is refused by name; what shapes and graphs
do not show is not noticed:

- a module without a rule keeps a tensor for the loss beside its output, as in ``self.kl = ...``: its gradient is lost;
- examples that go through the layers one at a time and whose losses are added up by hand: they count as one example.

Rules fill at most `DEFAULT_MIB` MiB at once with values of single examples, or ``workspace_mib``; not bounded are what a
transposed convolution makes of its outputs, and weights that several calls of one pass share.

The only room that imports BackPACK.
"""

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine, EngineName
from lightning_bayes.curvature.gradients import BareCapture, GradientCapture, GradientEngine
from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.curvature.loss import LossReduction, loss_functions
from lightning_bayes.curvature.measure import check_names, make_engine, measure
from lightning_bayes.curvature.measurement import KroneckerFactors, Measurement, Quantity
from lightning_bayes.curvature.per_example_loss import with_per_example_loss
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace

__all__ = [
    "DEFAULT_MIB",
    "AbstractEngine",
    "BareCapture",
    "Bernoulli",
    "Capture",
    "EngineName",
    "Gaussian",
    "GradientCapture",
    "GradientEngine",
    "KroneckerFactors",
    "Likelihood",
    "LossReduction",
    "Measurement",
    "Quantity",
    "Softmax",
    "Workspace",
    "check_names",
    "loss_functions",
    "make_engine",
    "measure",
    "with_per_example_loss",
]
