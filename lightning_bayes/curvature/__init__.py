"""What a backward pass is asked to measure: per-example gradients by layer rules, under two engines.

The only room that imports BackPACK.
"""

from lightning_bayes.curvature.engine import AbstractEngine, Capture, EngineName
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measure import check_names, make_engine, measure
from lightning_bayes.curvature.measurement import Measurement, Quantity

__all__ = [
    "AbstractEngine",
    "Capture",
    "EngineName",
    "LossReduction",
    "Measurement",
    "Quantity",
    "check_names",
    "make_engine",
    "measure",
]
