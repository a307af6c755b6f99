"""A posterior of earlier data as the prior of a fit: from an object or a checkpoint, and after a restart."""

from __future__ import annotations

import os

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.readout import load_posterior
from lightning_bayes.optim.weight_prior import holds_priors
from lightning_bayes.posteriors import AbstractPosterior


def read_prior(prior: AbstractPosterior | str | os.PathLike[str] | None) -> AbstractPosterior | None:
    """The posterior that a callback's argument means.

    Args:
        prior: A posterior, or a Lightning checkpoint with one; see `load_posterior` for what it refuses.

    Returns:
        The posterior; None for none.
    """
    if isinstance(prior, (str, os.PathLike)):
        found: AbstractPosterior = load_posterior(prior)
        return found
    return prior


def warn_of_another_prior(optimizer: MeanFieldOptimizer) -> None:
    """Warn if a resumed run keeps priors of weights that are not those of the callback.

    Args:
        optimizer: The optimizer after its state was restored.
    """
    if not holds_priors(optimizer.state, optimizer.weight_priors):
        rank_zero_warn(
            "The resumed run keeps the checkpoint's prior of each weight, which is not the callback's prior=. Start a new "
            "fit for another prior."
        )
