"""Curvature estimators of the mean-field methods.

    SquaredGradients     ĥ = mean_i g_i²                 the empirical Fisher's diagonal, through the curvature engine
    BatchSquare          ĥ = ĝ²                          of the whole batch under one weight sample: the gradient magnitude
    Reparameterised      ĥ = ĝ (θ - μ) / Σ               unbiased for E_q[diag ∇²f] (Price's theorem); may be negative
    SecondOrder          ĥ = mean_i diag ∇²ℓ_i           exact, through BackPACK; may be negative
                         ĥ = mean_i diag J_iᵀ H_i J_i    exact or from sampled labels, through BackPACK

A new estimator is one file: a subclass of `CurvatureEstimator`, which a method names as its `estimator`.
"""

from lightning_bayes.optim.diagonal.estimators.batch_size_check import BatchSizeCheck
from lightning_bayes.optim.diagonal.estimators.batch_square import BatchSquare
from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator, Scores
from lightning_bayes.optim.diagonal.estimators.reparameterised import Reparameterised
from lightning_bayes.optim.diagonal.estimators.second_order import SecondOrder
from lightning_bayes.optim.diagonal.estimators.squared_gradients import SquaredGradients

__all__ = [
    "BatchSizeCheck",
    "BatchSquare",
    "CurvatureEstimator",
    "Reparameterised",
    "Scores",
    "SecondOrder",
    "SquaredGradients",
]
