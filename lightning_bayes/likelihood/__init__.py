"""What a training loss says about the outputs of a network: recorded once, stored, and read by everything after the fit."""

from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.paths import Path, leaf_at, with_leaf
from lightning_bayes.likelihood.value import Likelihood, ScoredOutput, Targets

__all__ = ["Likelihood", "OutputLikelihood", "Path", "ScoredOutput", "Targets", "leaf_at", "with_leaf"]
