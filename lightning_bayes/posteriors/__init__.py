"""Posterior families over weights: sample, log_prob, entropy, kl, state_dict."""

from lightning_bayes.posteriors.base import AbstractPosterior, require_memory
from lightning_bayes.posteriors.block_tridiagonal import BlockTridiagonal, linear_chain
from lightning_bayes.posteriors.eigen_gaussian import EigenGaussian
from lightning_bayes.posteriors.files import (
    FileKind,
    atomic_save,
    atomic_write,
    named_if_unreadable,
    verified_load,
    verify_checksums,
)
from lightning_bayes.posteriors.full_gaussian import FullGaussian, check_full_size
from lightning_bayes.posteriors.low_rank import LowRankGaussian
from lightning_bayes.posteriors.matrix_gaussian import MatrixGaussian, kronecker_precision, layer_matrix, layer_tensors
from lightning_bayes.posteriors.mean_field import MeanField, marginals
from lightning_bayes.posteriors.precision import initial_curvature, minimal_precision, precision
from lightning_bayes.posteriors.scaled import FAMILIES, ScaledPosterior
from lightning_bayes.posteriors.shaped_noise import (
    NoiseShape,
    noise_damping,
    noise_scale,
    noise_shapes,
    prior_centre,
    root_mean_squares,
    tensor_size,
    tensor_sizes,
)

__all__ = [
    "FAMILIES",
    "AbstractPosterior",
    "BlockTridiagonal",
    "EigenGaussian",
    "FileKind",
    "FullGaussian",
    "LowRankGaussian",
    "MatrixGaussian",
    "MeanField",
    "NoiseShape",
    "ScaledPosterior",
    "atomic_save",
    "atomic_write",
    "check_full_size",
    "initial_curvature",
    "kronecker_precision",
    "layer_matrix",
    "layer_tensors",
    "linear_chain",
    "marginals",
    "minimal_precision",
    "named_if_unreadable",
    "noise_damping",
    "noise_scale",
    "noise_shapes",
    "precision",
    "prior_centre",
    "require_memory",
    "root_mean_squares",
    "tensor_size",
    "tensor_sizes",
    "verified_load",
    "verify_checksums",
]
