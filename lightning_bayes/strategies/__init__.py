"""What several processes do together."""

from lightning_bayes.strategies.reduce import all_reduce_mean_

__all__ = ["all_reduce_mean_"]
