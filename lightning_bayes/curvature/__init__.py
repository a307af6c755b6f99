"""What a backward pass is asked to measure: per-example gradients by layer rules, under two engines.

The only room that imports BackPACK.
"""

from lightning_bayes.curvature.engine import AbstractEngine, Capture, EngineName
from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from lightning_bayes.curvature.loss import LossReduction, loss_functions
from lightning_bayes.curvature.measure import check_names, make_engine, measure
from lightning_bayes.curvature.measurement import KroneckerFactors, Measurement, Quantity
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace

__all__ = [
    "DEFAULT_MIB",
    "AbstractEngine",
    "Bernoulli",
    "Capture",
    "EngineName",
    "Gaussian",
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
]
