"""What a training loss says about the outputs of a network: recorded once, stored, and read by everything after the fit."""

from lightning_bayes.likelihood.base import KINDS, OutputLikelihood
from lightning_bayes.likelihood.batches import ReadOutput, read_batch, read_output
from lightning_bayes.likelihood.inputs import Inputs
from lightning_bayes.likelihood.paths import Path, leaf_at, with_leaf
from lightning_bayes.likelihood.value import Likelihood, ScoredOutput, Targets

__all__ = [
    "KINDS",
    "Inputs",
    "Likelihood",
    "OutputLikelihood",
    "Path",
    "ReadOutput",
    "ScoredOutput",
    "Targets",
    "leaf_at",
    "read_batch",
    "read_output",
    "with_leaf",
]
