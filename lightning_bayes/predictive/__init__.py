"""Monte-Carlo predictions from a posterior, and how uncertain they are."""

from lightning_bayes.predictive.decomposition import entropy, mutual_information
from lightning_bayes.predictive.links import Link, Moments, Prediction, as_dict, check_link, combine, summarise
from lightning_bayes.predictive.monte_carlo import mc_predict
from lightning_bayes.predictive.samples import PosteriorSamples, Samples, check_fits, misfits, placed

__all__ = [
    "Link",
    "Moments",
    "PosteriorSamples",
    "Prediction",
    "Samples",
    "as_dict",
    "check_fits",
    "check_link",
    "combine",
    "entropy",
    "mc_predict",
    "misfits",
    "mutual_information",
    "placed",
    "summarise",
]
