"""Lightning callbacks for variational inference, other posteriors, and evaluation under a posterior."""

from lightning_bayes.callbacks.any_optimizer import OptimizerCallback
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.calibration import Calibration
from lightning_bayes.callbacks.deep_ensemble import DeepEnsembleCallback
from lightning_bayes.callbacks.diagonal import (
    BBBCallback,
    CVICallback,
    IVONCallback,
    MomentumVONCallback,
    NoisyAdamCallback,
    NoisyAdamFisherCallback,
    OGNCallback,
    VadaGradCallback,
    VadamCallback,
    VOGNCallback,
    VONCallback,
    Vprop0Callback,
    VpropCallback,
)
from lightning_bayes.callbacks.figures import EvaluationFigures
from lightning_bayes.callbacks.kfac import KFACCallback, NoisyKFACCallback
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.callbacks.mc_dropout import MCDropoutCallback
from lightning_bayes.callbacks.multi_mode import MultiModeCallback
from lightning_bayes.callbacks.predictions import PredictionWriter
from lightning_bayes.callbacks.recalibration import BatchNormRecalibration
from lightning_bayes.callbacks.swag import SWAGCallback
from lightning_bayes.callbacks.warm_start import WarmStart

__all__ = [
    "BBBCallback",
    "BatchNormRecalibration",
    "CVICallback",
    "Calibration",
    "DeepEnsembleCallback",
    "EvaluationFigures",
    "IVONCallback",
    "KFACCallback",
    "LaplaceCallback",
    "MCDropoutCallback",
    "MomentumVONCallback",
    "MultiModeCallback",
    "NoisyAdamCallback",
    "NoisyAdamFisherCallback",
    "NoisyKFACCallback",
    "OGNCallback",
    "OptimizerCallback",
    "PredictionWriter",
    "SWAGCallback",
    "VOGNCallback",
    "VONCallback",
    "VadaGradCallback",
    "VadamCallback",
    "VariationalCallback",
    "Vprop0Callback",
    "VpropCallback",
    "WarmStart",
]
