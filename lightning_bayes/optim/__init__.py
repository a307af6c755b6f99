"""Variational optimizers: one algorithm per file, a pure `update` first, then the `torch.optim.Optimizer`."""

from lightning_bayes.optim.dense.block_tridiagonal import BlockTridiagonalKFAC
from lightning_bayes.optim.dense.full_gaussian import VONG, FullVON, NNGFull
from lightning_bayes.optim.diagonal.bbb import BBB
from lightning_bayes.optim.diagonal.cvi import CVI
from lightning_bayes.optim.diagonal.ivon import IVON
from lightning_bayes.optim.diagonal.momentum_von import MomentumVON
from lightning_bayes.optim.diagonal.noisy_adam import NoisyAdam, NoisyAdamFisher
from lightning_bayes.optim.diagonal.ogn import OGN
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.vadagrad import VadaGrad
from lightning_bayes.optim.diagonal.vadam import Vadam
from lightning_bayes.optim.diagonal.vogn import VOGN
from lightning_bayes.optim.diagonal.von import VON, Positivity, ReparameterisedVON
from lightning_bayes.optim.diagonal.vprop import Vprop, Vprop0
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.hyperparameters import PriorMean
from lightning_bayes.optim.kronecker.kfac import KFAC, NoisyKFAC, PriorAt
from lightning_bayes.optim.noise import CounterNoise, counter_seed
from lightning_bayes.optim.optimizer import NoisyOptimizer
from lightning_bayes.optim.schedules import (
    BetaSchedule,
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    PiecewiseSchedule,
    Schedule,
    value_at,
)
from lightning_bayes.optim.variational import VariationalOptimizer

__all__ = [
    "BBB",
    "CVI",
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "VON",
    "VONG",
    "BetaSchedule",
    "BlockTridiagonalKFAC",
    "CosineSchedule",
    "CounterNoise",
    "ExponentialSchedule",
    "FisherName",
    "FullVON",
    "LinearSchedule",
    "MeanFieldState",
    "MomentumVON",
    "NNGFull",
    "NoisyAdam",
    "NoisyAdamFisher",
    "NoisyKFAC",
    "NoisyOptimizer",
    "PiecewiseSchedule",
    "Positivity",
    "PriorAt",
    "PriorMean",
    "ReparameterisedVON",
    "Schedule",
    "VadaGrad",
    "Vadam",
    "VariationalOptimizer",
    "Vprop",
    "Vprop0",
    "counter_seed",
    "value_at",
]
