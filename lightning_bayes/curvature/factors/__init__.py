"""Kronecker factors of a layer's curvature, computed from its input and its output gradient."""

from lightning_bayes.curvature.factors.conversion import split_bias
from lightning_bayes.curvature.factors.factors import has_factors, input_factor, output_factor
from lightning_bayes.curvature.factors.layer_records import (
    ExampleRows,
    FactorMoments,
    LayerRecords,
    LayerRows,
    Request,
    Scales,
)

__all__ = [
    "ExampleRows",
    "FactorMoments",
    "LayerRecords",
    "LayerRows",
    "Request",
    "Scales",
    "has_factors",
    "input_factor",
    "output_factor",
    "split_bias",
]
