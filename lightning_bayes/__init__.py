"""Bayesian deep learning with noisy natural gradients for PyTorch Lightning.

    Trainer(callbacks=[VOGNCallback()])

turns training of an unmodified LightningModule into variational inference. The same optimizers serve plain PyTorch.
"""

from importlib.metadata import PackageNotFoundError, version

from lightning_bayes.callbacks import (
    BatchNormRecalibration,
    BBBCallback,
    CVICallback,
    DeepEnsembleCallback,
    EvaluationFigures,
    IVONCallback,
    KFACCallback,
    MCDropoutCallback,
    MomentumVONCallback,
    NoisyAdamCallback,
    NoisyAdamFisherCallback,
    NoisyKFACCallback,
    OGNCallback,
    PosteriorDiagnostics,
    PosteriorScale,
    TemperatureScaling,
    VadaGradCallback,
    VadamCallback,
    VariationalCallback,
    VOGNCallback,
    VONCallback,
    Vprop0Callback,
    VpropCallback,
    WarmStart,
)
from lightning_bayes.curvature import Measurement, measure
from lightning_bayes.errors import BayesError
from lightning_bayes.optim import (
    BBB,
    CVI,
    IVON,
    KFAC,
    OGN,
    VOGN,
    VON,
    VONG,
    BlockTridiagonalKFAC,
    CosineSchedule,
    ExponentialSchedule,
    FullVON,
    LinearSchedule,
    MomentumVON,
    NNGFull,
    NoisyAdam,
    NoisyAdamFisher,
    NoisyKFAC,
    PiecewiseSchedule,
    ReparameterisedVON,
    Schedule,
    VadaGrad,
    Vadam,
    Vprop,
    Vprop0,
)
from lightning_bayes.optim.readout import load_posterior
from lightning_bayes.posteriors import MatrixGaussian, MeanField
from lightning_bayes.predictive import Prediction, mc_predict
from lightning_bayes.strategies import BayesDDPStrategy

try:
    __version__ = version("lightning-bayes")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BBB",
    "CVI",
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "VON",
    "VONG",
    "BBBCallback",
    "BatchNormRecalibration",
    "BayesDDPStrategy",
    "BayesError",
    "BlockTridiagonalKFAC",
    "CVICallback",
    "CosineSchedule",
    "DeepEnsembleCallback",
    "EvaluationFigures",
    "ExponentialSchedule",
    "FullVON",
    "IVONCallback",
    "KFACCallback",
    "LinearSchedule",
    "MCDropoutCallback",
    "MatrixGaussian",
    "MeanField",
    "Measurement",
    "MomentumVON",
    "MomentumVONCallback",
    "NNGFull",
    "NoisyAdam",
    "NoisyAdamCallback",
    "NoisyAdamFisher",
    "NoisyAdamFisherCallback",
    "NoisyKFAC",
    "NoisyKFACCallback",
    "OGNCallback",
    "PiecewiseSchedule",
    "PosteriorDiagnostics",
    "PosteriorScale",
    "Prediction",
    "ReparameterisedVON",
    "Schedule",
    "TemperatureScaling",
    "VOGNCallback",
    "VONCallback",
    "VadaGrad",
    "VadaGradCallback",
    "Vadam",
    "VadamCallback",
    "VariationalCallback",
    "Vprop",
    "Vprop0",
    "Vprop0Callback",
    "VpropCallback",
    "WarmStart",
    "load_posterior",
    "mc_predict",
    "measure",
]
