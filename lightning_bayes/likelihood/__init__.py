"""What a training loss says about the outputs of a network: recorded once, stored, and read by everything after the fit.

Importing this package imports all its files, so that every kind in them can be read from a file.
"""

import pkgutil
from importlib import import_module

from lightning_bayes.likelihood.base import KINDS, OutputLikelihood
from lightning_bayes.likelihood.batches import Labels, ReadOutput, labels_in, labels_of_pair, read_output
from lightning_bayes.likelihood.bernoulli import Bernoulli
from lightning_bayes.likelihood.categorical import Categorical
from lightning_bayes.likelihood.family import Family, Observation
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.inputs import Inputs
from lightning_bayes.likelihood.names import LikelihoodName, LinkArgument, find_kind
from lightning_bayes.likelihood.paths import Path, leaf_at, with_leaf
from lightning_bayes.likelihood.poisson import Poisson
from lightning_bayes.likelihood.predicted_gaussian import PredictedGaussian
from lightning_bayes.likelihood.predictions import Moments, Observed, Prediction, as_dict
from lightning_bayes.likelihood.quantiles import Quantiles
from lightning_bayes.likelihood.raw import Raw
from lightning_bayes.likelihood.scoring import predictive_nll
from lightning_bayes.likelihood.value import Likelihood, ScoredOutput, Targets

__all__ = [
    "KINDS",
    "Bernoulli",
    "Categorical",
    "Family",
    "Gaussian",
    "Inputs",
    "Labels",
    "Likelihood",
    "LikelihoodName",
    "LinkArgument",
    "Moments",
    "Observation",
    "Observed",
    "OutputLikelihood",
    "Path",
    "Poisson",
    "PredictedGaussian",
    "Prediction",
    "Quantiles",
    "Raw",
    "ReadOutput",
    "ScoredOutput",
    "Targets",
    "as_dict",
    "find_kind",
    "labels_in",
    "labels_of_pair",
    "leaf_at",
    "predictive_nll",
    "read_output",
    "with_leaf",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
