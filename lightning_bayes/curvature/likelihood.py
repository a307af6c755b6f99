"""The likelihoods by their earlier names; see `lightning_bayes.likelihood`."""

from lightning_bayes.likelihood.base import OutputLikelihood as Likelihood
from lightning_bayes.likelihood.bernoulli import Bernoulli
from lightning_bayes.likelihood.categorical import Categorical as Softmax
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.poisson import Poisson

__all__ = ["Bernoulli", "Gaussian", "Likelihood", "Poisson", "Softmax"]
