"""The Lightning seam: callbacks that turn training into variational inference."""

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.ogn import OGNCallback
from lightning_bayes.callbacks.predictions import PredictionWriter
from lightning_bayes.callbacks.vogn import VOGNCallback

__all__ = [
    "OGNCallback",
    "PredictionWriter",
    "VOGNCallback",
    "VariationalCallback",
]
