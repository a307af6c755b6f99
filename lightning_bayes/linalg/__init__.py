"""Structured linear algebra: Kronecker products, their differences and chains, damping, and Cholesky with jitter.

All functions are pure. Leading dimensions ``[..., n, n]`` are a batch of matrices.
"""

from lightning_bayes.linalg.block_tridiagonal import BlockTridiagonalInverse
from lightning_bayes.linalg.cholesky import JITTER_LADDER, cholesky, inverse_root
from lightning_bayes.linalg.damping import pi_damped, pi_ratio
from lightning_bayes.linalg.difference import DifferenceInverse
from lightning_bayes.linalg.eigen import symmetric_eigen
from lightning_bayes.linalg.kronecker import KroneckerProduct
from lightning_bayes.linalg.triangular import upper_matmul

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
