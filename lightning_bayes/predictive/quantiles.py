"""Quantiles of mixtures; see `lightning_bayes.likelihood.mixtures`."""

from lightning_bayes.likelihood.mixtures import grouped

__all__ = ["grouped"]
