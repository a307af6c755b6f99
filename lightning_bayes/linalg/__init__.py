"""Structured linear algebra: Kronecker products, their differences and chains, damping, and Cholesky with jitter.

All functions are pure. Leading dimensions ``[..., n, n]`` are a batch of matrices.
"""

from lightning_bayes.linalg.block_tridiagonal import BlockTridiagonalInverse, DifferenceInverse
from lightning_bayes.linalg.factors import JITTER_LADDER, cholesky, inverse_root, symmetric_eigen, upper_matmul
from lightning_bayes.linalg.kronecker import KroneckerProduct, pi_damped, pi_ratio

__all__ = [
    "JITTER_LADDER",
    "BlockTridiagonalInverse",
    "DifferenceInverse",
    "KroneckerProduct",
    "cholesky",
    "inverse_root",
    "pi_damped",
    "pi_ratio",
    "symmetric_eigen",
    "upper_matmul",
]
