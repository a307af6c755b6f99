"""Distributed training."""

from lightning_bayes.strategies.bayes_ddp import BayesDDPStrategy
from lightning_bayes.strategies.reduce import all_reduce_mean_, all_reduce_sum_, check_agreement

__all__ = ["BayesDDPStrategy", "all_reduce_mean_", "all_reduce_sum_", "check_agreement"]
