"""Posterior families over weights: sample, log_prob, entropy, kl, state_dict; and reading them from checkpoints."""

from lightning_bayes.posteriors.checkpoint import CALLBACK_KEY, load_posterior, posterior_from_checkpoint
from lightning_bayes.posteriors.mean_field import MeanField
from lightning_bayes.posteriors.precision import (
    group_arguments,
    initial_curvature,
    kl_weight_now,
    noise_floor,
    precision,
    root_mean_squares,
    state_precision,
    tensor_sizes,
)

__all__ = [
    "CALLBACK_KEY",
    "MeanField",
    "group_arguments",
    "initial_curvature",
    "kl_weight_now",
    "load_posterior",
    "noise_floor",
    "posterior_from_checkpoint",
    "precision",
    "root_mean_squares",
    "state_precision",
    "tensor_sizes",
]
