"""One file, one small pure function per layer type. Importing this package registers them all."""

from lightning_bayes.curvature.rules import (
    batch_norm,
    conv,
    conv_transpose,
    embedding,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    prelu,
    rms_norm,
)
from lightning_bayes.curvature.rules.registry import per_example, per_example_rule, rule_type, square_rule, sums

__all__ = [
    "batch_norm",
    "conv",
    "conv_transpose",
    "embedding",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "per_example",
    "per_example_rule",
    "prelu",
    "rms_norm",
    "rule_type",
    "square_rule",
    "sums",
]
