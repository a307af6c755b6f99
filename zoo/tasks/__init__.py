"""Ordinary LightningModules with a loss and metrics. A callback of this package makes them Bayesian."""

from __future__ import annotations

from lightning_bayes.zoo.tasks.base import CosineToEnd
from lightning_bayes.zoo.tasks.classification import BayesClassifier
from lightning_bayes.zoo.tasks.regression import BayesRegressor

__all__ = ["BayesClassifier", "BayesRegressor", "CosineToEnd"]
