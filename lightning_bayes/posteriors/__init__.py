"""Posterior families over weights: sample, log_prob, entropy, kl, state_dict; and reading them from checkpoints."""

from lightning_bayes.posteriors.base import AbstractPosterior
from lightning_bayes.posteriors.block_tridiagonal import BlockTridiagonal
from lightning_bayes.posteriors.checkpoint import (
    CALLBACK_KEY,
    callback_state,
    load_posterior,
    posterior_from_checkpoint,
    read_checkpoint,
    require_checkpoint,
)
from lightning_bayes.posteriors.files import (
    FileKind,
    atomic_save,
    atomic_write,
    named_if_unreadable,
    verified_load,
    verify_checksums,
)
from lightning_bayes.posteriors.full_gaussian import FullGaussian, check_full_size
from lightning_bayes.posteriors.layer_matrix import layer_matrix, layer_tensors
from lightning_bayes.posteriors.layer_precision import layer_floored, layer_noise_damping, layer_precision
from lightning_bayes.posteriors.linear_chain import linear_chain
from lightning_bayes.posteriors.matrix_gaussian import MatrixGaussian, kronecker_precision
from lightning_bayes.posteriors.mean_field import MeanField
from lightning_bayes.posteriors.memory import require_memory
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
from lightning_bayes.posteriors.states import Entry, WeightPosterior, posterior_of

__all__ = [
    "CALLBACK_KEY",
    "AbstractPosterior",
    "BlockTridiagonal",
    "Entry",
    "FileKind",
    "FullGaussian",
    "MatrixGaussian",
    "MeanField",
    "WeightPosterior",
    "atomic_save",
    "atomic_write",
    "callback_state",
    "check_full_size",
    "group_arguments",
    "initial_curvature",
    "kl_weight_now",
    "kronecker_precision",
    "layer_floored",
    "layer_matrix",
    "layer_noise_damping",
    "layer_precision",
    "layer_tensors",
    "linear_chain",
    "load_posterior",
    "named_if_unreadable",
    "noise_floor",
    "posterior_from_checkpoint",
    "posterior_of",
    "precision",
    "read_checkpoint",
    "require_checkpoint",
    "require_memory",
    "root_mean_squares",
    "state_precision",
    "tensor_sizes",
    "verified_load",
    "verify_checksums",
]
